"""Parsers by name, and which ones a model's chat template calls for."""

from __future__ import annotations

from fivefold.core.errors import ConfigError, TokenizerError, nearest
from fivefold.engines.serve.server.parsers.pieces import ChatParser, Piece
from fivefold.engines.serve.server.parsers.reasoning import CLOSING, OPENING, ThinkParser
from fivefold.engines.serve.server.parsers.tool_calls import HERMES, LLAMA3_JSON, CallParser
from fivefold.text.chat import ChatTemplate

CALL_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
_OPENED = {"think": False, "think_opened": True}
TOOL_FORMATS = tuple(CALL_FORMATS)
"""hermes: `<tool_call>{json}</tool_call>` (Hermes, Qwen). llama3_json: the bare JSON (Llama 3)."""
REASONING_FORMATS = tuple(_OPENED)
"""think: the answer opens with `<think>`. think_opened: the prompt ends with it."""
OTHER_CALLS = ("<function=", "<arg_key>")
"""In templates that put XML, not JSON, between the marks of Hermes."""


class _PlainParser:
    """Text passes through."""

    def push(self, text: str) -> Piece:
        return Piece(text)

    def finish(self) -> Piece:
        return Piece()


class _BothParser:
    """Reasoning first; what is content after it may call tools."""

    def __init__(self, reasoning: ThinkParser, calls: CallParser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, text: str) -> Piece:
        first = self._reasoning.push(text)
        second = self._calls.push(first.content)
        return Piece(second.content, first.reasoning, second.tool_calls)

    def finish(self) -> Piece:
        first = self._reasoning.finish()
        pieces = (self._calls.push(first.content), self._calls.finish())
        return Piece(
            "".join(piece.content for piece in pieces),
            first.reasoning,
            tuple(call for piece in pieces for call in piece.tool_calls),
        )


def make_parser(tools: str | None, reasoning: str | None, prompt: str = "") -> ChatParser:
    """A parser for one answer, of these formats; without any the text passes through.

    Templates may open or close the reasoning depending on the request. So where the end of
    `prompt`, the text that the template made, shows which, that counts. Raises ConfigError for an
    unknown format.
    """
    if tools is not None and tools not in CALL_FORMATS:
        raise ConfigError(f"tool format {tools} is unknown", nearest(tools, TOOL_FORMATS))
    if reasoning is not None and reasoning not in _OPENED:
        mend = nearest(reasoning, REASONING_FORMATS)
        raise ConfigError(f"reasoning format {reasoning} is unknown", mend)
    calls = None if tools is None else CallParser(CALL_FORMATS[tools])
    if reasoning is None or prompt.rstrip().endswith(CLOSING):
        return calls or _PlainParser()
    thoughts = ThinkParser(opened=_OPENED[reasoning] or prompt.rstrip().endswith(OPENING))
    return thoughts if calls is None else _BothParser(thoughts, calls)


def guess_formats(chat_template: str | None) -> tuple[str | None, str | None]:
    """The formats of tool calls and of reasoning that a template was written for."""
    if chat_template is None:
        return None, None
    return _tool_format(chat_template), _reasoning_format(chat_template)


def _tool_format(template: str) -> str | None:
    if HERMES.opening in template:
        return None if any(mark in template for mark in OTHER_CALLS) else "hermes"
    named = LLAMA3_JSON.opening in template or '"parameters": dictionary of argument' in template
    return "llama3_json" if named else None


def _reasoning_format(template: str) -> str | None:
    if OPENING not in template and CLOSING not in template:
        return None
    special = {"bos_token": "", "eos_token": ""}
    try:
        prompt = ChatTemplate(template, special).render([{"role": "user", "content": "Hello"}])
    except TokenizerError:  # it wants something else from its messages
        return "think"
    return "think_opened" if prompt.rstrip().endswith(OPENING) else "think"
