"""Fields that OpenAI knows and this server has nothing for, refused when their value matters.

Each is accepted with the values that ask for nothing, so that clients which always send a field
still work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.engines.serve.server.api_errors import unsupported


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values that ask for nothing (None is always one), and why others are refused."""

    why: str
    harmless: tuple[Any, ...] = ()


NOT_KEPT = "nothing is stored here"

COMPLETION: Mapping[str, Refusal] = {
    "suffix": Refusal("the model continues a prompt and does not fill a gap", ("",)),
}
CHAT: Mapping[str, Refusal] = {
    "audio": Refusal("the model writes text alone"),
    "function_call": Refusal("use tool_choice"),
    "functions": Refusal("use tools", ([],)),
    "metadata": Refusal(NOT_KEPT, ({},)),
    "modalities": Refusal("the model writes text alone", (["text"], [])),
    "moderation": Refusal("no moderation runs here"),
    "prediction": Refusal("no speculative decoding runs here"),
    "prompt_cache_options": Refusal("equal prefixes are always cached"),
    "prompt_cache_retention": Refusal("cached prefixes stay until their memory is needed"),
    "service_tier": Refusal("there is one tier", ("auto", "default")),
    "store": Refusal(NOT_KEPT, (False,)),
    "verbosity": Refusal("the model knows no such setting; say it in the prompt", ("medium",)),
    "web_search_options": Refusal("nothing is looked up in the web"),
}


def check(fields: Mapping[str, Any], known: Mapping[str, Refusal]) -> None:
    """Raise APIError for the first field whose value would have to change the answer."""
    for name, refusal in known.items():
        value = fields.get(name)
        if value is not None and value not in refusal.harmless:
            raise unsupported(name, refusal.why)
