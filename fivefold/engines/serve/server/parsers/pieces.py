"""What a parser of chat answers gives: content, reasoning and tool calls, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call of a tool. `id` and `name` come with the first piece of a call only."""

    index: int
    """Which of the answer's calls."""
    id: str | None
    name: str | None
    arguments: str
    """JSON text; the pieces of a call add up to its arguments."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is certain after some more text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ChatParser(Protocol):
    """Takes a model's text as it arrives. However it is cut, the pieces add up to the same."""

    def push(self, text: str) -> Piece:
        """The next text."""
        ...

    def finish(self) -> Piece:
        """No more text comes: what was held back."""
        ...
