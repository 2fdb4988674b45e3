"""What an answer must look like, as the user says it. Names are vLLM's."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fivefold.core.errors import PromptError

MOST_CHARACTERS = 1 << 16
MOST_CHOICES = 4096


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer: exactly one of these. A wrong value raises PromptError."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema; kept as text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """The whole answer matches this regular expression."""
    choice: Sequence[str] | None = None
    """The answer is one of these strings."""
    grammar: str | None = None
    """An EBNF grammar whose first rule is `root`, as llama.cpp writes them."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Marks with JSON of a schema between them, in XGrammar's words; kept as text."""

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "is empty"
            raise PromptError(
                f"structured_outputs {what}",
                "give one of json, json_object, regex, choice, grammar, structural_tag",
            )
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _object(name, getattr(self, name)))
        if self.json_object is not None and self.json_object is not True:
            raise PromptError(f"json_object={self.json_object!r} asks for nothing", "leave it out")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))


def _object(name: str, given: Any) -> str:
    what = "the schema" if name == "json" else name
    if not isinstance(given, str):
        try:
            given = json_text.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"{what} is no JSON: {error}", "give an object") from None
    _check_text(name, given)
    try:
        parsed = json_text.loads(given)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{what} is no JSON: {error}", "give an object") from None
    if not isinstance(parsed, dict):
        raise PromptError(f"{what} is {given[:40]}", 'give an object such as {"type": "object"}')
    return given


def _choices(given: Any) -> tuple[str, ...]:
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not given or not all(isinstance(c, str) and c for c in given):
        raise PromptError(f"choice={given!r} is no list of texts", 'write choice=["yes", "no"]')
    if len(given) > MOST_CHOICES:
        raise PromptError(f"choice has {len(given)} texts", f"give at most {MOST_CHOICES}")
    _check_text("choice", "".join(given))
    return tuple(given)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise PromptError(f"{name}={text!r} is no text", f"write {name}='...'")
    if len(text) > MOST_CHARACTERS:
        raise PromptError(
            f"{name} has {len(text)} characters", f"give at most {MOST_CHARACTERS} of them"
        )
