"""Reads a streamed answer: when its tokens came, how many they were, how it ended."""

from __future__ import annotations

import json
from typing import Any

from fivefold.core.errors import one_line
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.sse import EventDecoder

SHOWN = 200  # characters of what a server said
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class StreamError(Exception):
    """A stream that is no answer: `kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class AnswerReader:
    """Takes bytes and the time they came. Knows no clock and no network."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.pieces = 0
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.done = False
        self._events = EventDecoder()

    def push(self, data: bytes, now: float) -> None:
        """Bytes that came at `now`. Raises StreamError for an error event and for no JSON."""
        for event in self._events.push(data):
            self._take(event, now)

    def finish(self, now: float) -> None:
        """The stream has ended. Raises StreamError unless it held a whole answer."""
        for event in self._events.finish():
            self._take(event, now)
        if self.finish_reason is None and not self.done:
            raise StreamError("cut short", f"the stream ended after {self.pieces} pieces")
        if self.first is None and _count(self.usage, "completion_tokens"):
            self.first = self.last = now  # tokens without text (half a character): told at the end
        if self.first is None:
            raise StreamError("no tokens", "the stream held no token")

    def fill(self, outcome: Outcome) -> None:
        """Write what was read into the outcome of its request."""
        outcome.first, outcome.last, outcome.gaps = self.first, self.last, self.gaps
        outcome.finish_reason = self.finish_reason
        counted = _count(self.usage, "completion_tokens")
        outcome.counted_by = "pieces" if counted is None else "usage"
        outcome.completion_tokens = self.pieces if counted is None else counted
        outcome.prompt_tokens = _count(self.usage, "prompt_tokens")
        outcome.cached_tokens = _count(self.usage.get("prompt_tokens_details"), "cached_tokens")

    def _take(self, event: bytes, now: float) -> None:
        if event.strip() == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            raise StreamError("bad stream", f"no JSON: {shown(event)}") from None
        if not isinstance(chunk, dict):
            raise StreamError("bad stream", f"no object: {shown(event)}")
        if chunk.get("error"):
            raise StreamError("error event", error_message(chunk))
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                raise StreamError("bad stream", f"a choice is no object: {shown(event)}")
            if has_token(choice):
                self._note(now)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _note(self, now: float) -> None:
        self.pieces += 1
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now


def has_token(choice: dict[str, Any]) -> bool:
    """Whether a piece stands for a token.

    Empty text in the middle is one whose character is not yet whole; empty text with the role
    comes before the first token, with the reason for the end after the last.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text")) or not choice.get("finish_reason")
    if any(delta.get(name) for name in TEXTS):
        return True
    return "content" in delta and "role" not in delta and not choice.get("finish_reason")


def _count(counts: Any, name: str) -> int | None:
    found = counts.get(name) if isinstance(counts, dict) else None
    return found if type(found) is int and found >= 0 else None


def error_message(body: Any) -> str:
    """What a server says went wrong, in OpenAI's shape or any other."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return one_line(error)[:SHOWN]


def shown(data: bytes) -> str:
    """The beginning of some bytes, on one line."""
    return one_line(data.decode("utf-8", "replace"))[:SHOWN]
