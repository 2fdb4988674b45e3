"""From an answer's text to a chat message: content, reasoning and tool calls, whole or in pieces."""

from __future__ import annotations

from typing import Any

from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.server.parsers import ChatParser, Piece, ToolCallDelta


class MessageReader:
    """Reads one answer. `parallel`: more than its first tool call counts."""

    def __init__(self, parser: ChatParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._called = False

    def read(self, text: str, completion: Completion | None) -> list[dict[str, Any]]:
        """Deltas for this piece of text; `completion` comes with the last one."""
        pieces = [self._parser.push(text)]
        if completion is not None:
            pieces.append(self._parser.finish())
        return [delta for piece in pieces if (delta := self._delta(piece))]

    def reason(self, completion: Completion) -> str:
        """Why the answer ended, as OpenAI names it."""
        if self._called and completion.finish_reason == "stop":
            return "tool_calls"
        return completion.finish_reason

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        calls = [call for call in piece.tool_calls if self._parallel or call.index == 0]
        if calls:
            self._called = True
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return delta


def whole_message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream of these deltas amounts to."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            _add_call(calls, call)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = list(calls.values())
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _add_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    function = delta["function"]
    if delta["index"] not in calls:
        calls[delta["index"]] = {
            "id": delta["id"],
            "type": "function",
            "function": {"name": function["name"], "arguments": function["arguments"]},
        }
    else:
        calls[delta["index"]]["function"]["arguments"] += function["arguments"]


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
