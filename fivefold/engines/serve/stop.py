"""Stop strings in streamed text: cut them, and never show their beginning.

The first stop string to be *completed* ends the text, as if it arrived character by character
(of several completed by the same character, the longest). So the result does not depend on how
the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text goes in by pieces; what may be shown comes out.

    The end of the text that could be the beginning of a stop string is held back until more
    text decides. After a match `stopped` names the string, and further text is ignored.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self.stops = tuple(stops)
        self.include_stop = include_stop
        self.stopped: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The next piece of text -> text that is safe to show."""
        if self.stopped is not None:
            return ""
        if not self.stops:
            return text
        buffer = self._held + text
        found = self._first_completed(buffer)
        if found is not None:
            start, self.stopped = found
            self._held = ""
            return buffer[: start + len(self.stopped)] if self.include_stop else buffer[:start]
        keep = begun_length(buffer, self.stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, buffer: str) -> tuple[int, str] | None:
        matches = [(buffer.find(stop), stop) for stop in self.stops]
        completed = [(at + len(stop), at, stop) for at, stop in matches if at >= 0]
        if not completed:
            return None
        _, start, stop = min(completed)  # earliest end, then earliest start: the longest
        return start, stop


def begun_length(text: str, words: Sequence[str]) -> int:
    """Characters at the end of `text` that are the beginning, but not the whole, of a word."""
    for length in range(min(len(text), max(map(len, words), default=1) - 1), 0, -1):
        end = text[-length:]
        if any(word.startswith(end) for word in words):
            return length
    return 0
