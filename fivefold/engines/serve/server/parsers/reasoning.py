"""Reasoning before an answer: `<think>...</think>`, then what the user is told."""

from __future__ import annotations

from fivefold.engines.serve.server.parsers.pieces import Piece
from fivefold.engines.serve.stop import begun_length

OPENING = "<think>"
CLOSING = "</think>"
LINE_ENDS = "\r\n"


class ThinkParser:
    """Tells reasoning from content.

    Reasoning may only stand at the beginning: later marks are text. `opened`: the prompt has
    opened it, so that the text begins inside. Line ends next to a mark are left out. Reasoning
    that is never closed stays reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        self.opened = opened
        self._step = self._before
        self._pending = ""
        self._reasoning = ""
        self._content = ""

    def push(self, text: str) -> Piece:
        """The next text."""
        self._pending += text
        while self._step():
            pass
        return self._piece()

    def finish(self) -> Piece:
        """No more text comes: what was held back."""
        rest, self._pending = self._pending, ""
        if self._step == self._inside or (self._step == self._before and self.opened):
            self._reasoning = rest
        else:
            self._content = rest
        return self._piece()

    def _piece(self) -> Piece:
        piece = Piece(self._content, self._reasoning)
        self._content = self._reasoning = ""
        return piece

    # Each step takes what it can of the text, and tells whether the next has something to do.

    def _before(self) -> bool:
        text = self._pending.lstrip()
        if text.startswith(OPENING):
            self._pending = text.removeprefix(OPENING)
            self._step = self._beginning
        elif OPENING.startswith(text):
            return False
        else:
            self._step = self._beginning if self.opened else self._after
        return True

    def _beginning(self) -> bool:
        self._pending = self._pending.lstrip(LINE_ENDS)
        if self._pending:
            self._step = self._inside
        return bool(self._pending)

    def _inside(self) -> bool:
        text, mark, rest = self._pending.partition(CLOSING)
        if mark:
            self._reasoning += text.rstrip(LINE_ENDS)
            self._pending = rest
            self._step = self._closed
            return True
        sure = text[: len(text) - begun_length(text, [CLOSING])].rstrip(LINE_ENDS)
        self._reasoning += sure
        self._pending = text[len(sure) :]
        return False

    def _closed(self) -> bool:
        self._pending = self._pending.lstrip(LINE_ENDS)
        if self._pending:
            self._step = self._after
        return bool(self._pending)

    def _after(self) -> bool:
        self._content += self._pending
        self._pending = ""
        return False
