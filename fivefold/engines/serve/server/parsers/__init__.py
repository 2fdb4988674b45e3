"""From a model's text to content, reasoning and tool calls."""

from fivefold.engines.serve.server.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    guess_formats,
    make_parser,
)
from fivefold.engines.serve.server.parsers.pieces import ChatParser, Piece, ToolCallDelta

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ChatParser",
    "Piece",
    "ToolCallDelta",
    "guess_formats",
    "make_parser",
]
