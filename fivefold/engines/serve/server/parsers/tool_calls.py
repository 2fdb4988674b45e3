"""Calls of tools in a model's text: what marks them, and how they are told from other text."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from fivefold.engines.serve.server.parsers.call_reader import CallReader
from fivefold.engines.serve.server.parsers.pieces import Piece, ToolCallDelta
from fivefold.engines.serve.stop import begun_length


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Marks around a call's JSON."""

    opening: str
    closing: str
    """After a call, where the model does not forget it."""
    bare: bool
    """Whether a call may stand at the start, or after another call, without its opening mark."""


HERMES = CallFormat("<tool_call>", "</tool_call>", bare=False)
LLAMA3_JSON = CallFormat("<|python_tag|>", ";", bare=True)


def new_call_id() -> str:
    """A name for a call that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallParser:
    """Tells calls from content, whatever pieces the text comes in.

    Text that looks like a call and is none is given back as content, mark included. Arguments
    stream, so a call that breaks inside them cannot be taken back: it keeps the arguments so far,
    always the beginning of valid JSON, and what does not fit is content. White space around calls
    is shown only between two texts, that before the first call.
    """

    def __init__(self, form: CallFormat, new_id: Callable[[], str] = new_call_id) -> None:
        self.form = form
        self._new_id = new_id
        self._calls = 0
        self._pending = ""
        self._gap = ""
        self._mark = ""
        self._reader: CallReader | None = None
        self._in_gap = form.bare
        self._closable = False
        self._shown = False
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str) -> Piece:
        """The next text."""
        self._pending += text
        while self._pending and self._advance():
            pass
        return self._piece()

    def finish(self) -> Piece:
        """No more text comes: what was held back. A call that has not begun is content."""
        rest, self._pending = self._pending, ""
        if self._reader is not None and not self._reader.begun:
            self._show(self._mark + self._reader.text)
        if not self._calls:
            self._show(self._take_gap() + rest)
        elif rest.strip():
            self._show(rest)
        self._reader = None
        return self._piece()

    def _piece(self) -> Piece:
        content, deltas = "".join(self._content), tuple(self._deltas)
        self._content, self._deltas = [], []
        return Piece(content, "", deltas)

    def _advance(self) -> bool:
        """One step; False when it takes more text to decide."""
        if self._reader is not None:
            return self._read_call(self._reader)
        return self._cross_gap() if self._in_gap else self._read_text()

    def _cross_gap(self) -> bool:
        """At the start, or after a call: white space, a closing mark, then a call or text."""
        rest = self._pending.lstrip()
        if not rest:
            return False
        self._gap = self._gap or self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if self._closable and rest.startswith(self.form.closing):
            self._pending = rest[len(self.form.closing) :]
            self._closable = False
            return True
        if rest.startswith(self.form.opening):
            return self._open(self.form.opening)
        if self.form.bare and rest.startswith("{"):
            return self._open("")
        marks = (self.form.opening, self.form.closing) if self._closable else (self.form.opening,)
        if begun_length(rest, marks) < len(rest):
            self._in_gap = False
            return True
        return False

    def _read_text(self) -> bool:
        """Text up to an opening mark, without the white space before that."""
        text, mark, _ = self._pending.partition(self.form.opening)
        sure = len(text) if mark else len(text) - begun_length(text, [self.form.opening])
        shown = text[:sure].rstrip()
        self._show(shown)
        self._pending = self._pending[len(shown) :]
        if not mark:
            return False
        self._gap += text[len(shown) :]
        self._pending = self._pending[len(text) - len(shown) :]
        return self._open(mark)

    def _open(self, mark: str) -> bool:
        """A call may begin here."""
        self._pending = self._pending.removeprefix(mark)
        self._mark = mark
        self._reader = CallReader(lenient=bool(mark))
        return True

    def _read_call(self, reader: CallReader) -> bool:
        had_begun = reader.begun
        taken = reader.read(self._pending)
        broke = taken < len(self._pending) and not reader.ended
        self._pending = self._pending[taken:]
        if reader.begun:
            self._tell(reader, first=not had_begun)
        elif broke or reader.ended:
            self._show(self._mark + reader.text)
        if broke or reader.ended:
            self._reader = None
            self._in_gap = self._closable = reader.begun and not broke
        return bool(self._pending)

    def _tell(self, reader: CallReader, *, first: bool) -> None:
        arguments = reader.take()
        if first:
            self._deltas.append(ToolCallDelta(self._calls, self._new_id(), reader.name, arguments))
            self._calls += 1
        elif arguments:
            self._deltas.append(ToolCallDelta(self._calls - 1, None, None, arguments))

    def _show(self, text: str) -> None:
        """Content, after the white space that was kept from before it."""
        if text:
            gap = self._take_gap()
            self._content.append(gap + text if self._shown or not self._calls else text)
            self._shown = True

    def _take_gap(self) -> str:
        gap, self._gap = self._gap, ""
        return gap
