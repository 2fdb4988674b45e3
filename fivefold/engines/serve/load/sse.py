"""Server-sent events out of bytes as they come (WHATWG HTML, 9.2)."""

from __future__ import annotations


class EventDecoder:
    """Takes pieces cut anywhere; gives the data of events that are whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> list[bytes]:
        """Data of the events that end in `piece`. Comments and other fields are passed over."""
        held = self._rest + piece
        held, cut = (held[:-1], b"\r") if held.endswith(b"\r") else (held, b"")  # \n may follow
        lines = held.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + cut
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

    def finish(self) -> list[bytes]:
        """Data of an event whose empty line never came: some servers leave out the last."""
        return self.push(b"\n\n")
