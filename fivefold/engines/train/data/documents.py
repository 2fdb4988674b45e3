"""What a source holds: documents, and how a record of a table becomes one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.core.config import SourceSection
from fivefold.core.errors import DataError

ANSWERING_ROLE = "assistant"
CHAT_SHAPE = 'write [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text. With `answer`, only what follows that character is to be learnt."""

    place: str
    text: str
    answer: int | None = None

    def plain(self) -> str:
        """The text itself."""
        return self.text

    def identity(self) -> bytes:
        """What makes this document the one it is, whatever the tokenizer."""
        return f"{self.answer}\0{self.text}".encode()


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """A conversation, of which the assistant's messages are to be learnt."""

    place: str
    messages: list[dict[str, Any]]

    def plain(self) -> str:
        """The messages' text, a line break between them."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)

    def identity(self) -> bytes:
        """What makes this document the one it is, whatever the tokenizer."""
        return json.dumps(self.messages, ensure_ascii=False, sort_keys=True).encode()


Document = TextDocument | ChatDocument


@dataclass(frozen=True)
class Form:
    """How records of a source are read: which kind of document, from which fields."""

    kind: Literal["text", "pair", "chat"]
    fields: tuple[str, ...]

    @property
    def has_answers(self) -> bool:
        """True when only part of each document is to be learnt."""
        return self.kind != "text"


def choose_form(names: Collection[str], section: SourceSection, place: str) -> Form:
    """The form of a source whose first record, or schema, has the fields `names`.

    Fields named in the configuration come first; else `messages`, then `prompt` with
    `completion`, then `text`. Raises DataError naming the fields there are.
    """
    text = Form("text", (section.field,))
    pair = Form("pair", (section.prompt, section.completion))
    chat = Form("chat", (section.messages,))
    named = [
        form
        for form, keys in (
            (chat, ("messages",)),
            (pair, ("prompt", "completion")),
            (text, ("field",)),
        )
        if form.fields != tuple(SourceSection.model_fields[key].default for key in keys)
    ]
    wanted = named or [chat, pair, text]
    for form in wanted:
        if all(field in names for field in form.fields):
            return form
    ways = " or ".join(" with ".join(repr(f) for f in form.fields) for form in wanted)
    raise DataError(
        f"{place} has no field {ways}; its fields are: {_listed(names)}",
        "name them with the source's `field`, `prompt` and `completion`, or `messages`",
    )


def to_document(record: Any, form: Form, place: str) -> Document | None:
    """One record as a document; None when its text is empty.

    Raises DataError naming `place` for a record that is no mapping, lacks a field or holds a
    value of another type.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{place} is {_type(record)}, not an object with fields", "mend or remove it"
        )
    for field in form.fields:
        if field not in record:
            raise DataError(
                f"{place} has no field {field!r}; its fields are: {_listed(record)}",
                "every record of a source has the same fields",
            )
    if form.kind == "chat":
        return _chat(record[form.fields[0]], form.fields[0], place)
    texts = [_text(record[field], field, place) for field in form.fields]
    if not any(texts):
        return None
    return TextDocument(place, "".join(texts), len(texts[0]) if form.kind == "pair" else None)


def _text(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{place}: field {field!r} is {_type(value)}, not text", "mend or remove it"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{place}: field {field!r} holds half of a surrogate pair", "mend the text"
            ) from None
    return value


def _chat(messages: Any, field: str, place: str) -> ChatDocument:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{place}: field {field!r} is {_type(messages)}, not a list of messages", CHAT_SHAPE
        )
    for number, message in enumerate(messages, 1):
        at = f"{place}: message {number}"
        if not isinstance(message, Mapping):
            raise DataError(f"{at} is {_type(message)}, not an object", CHAT_SHAPE)
        for key in ("role", "content"):
            if key not in message:
                raise DataError(
                    f"{at} has no {key!r}; its fields are: {_listed(message)}", CHAT_SHAPE
                )
            _text(message[key], key, at)
    if not any(message["role"] == ANSWERING_ROLE for message in messages):
        raise DataError(
            f"{place} has no message of role {ANSWERING_ROLE!r}, so nothing to learn",
            "leave that conversation out",
        )
    return ChatDocument(place, [dict(message) for message in messages])


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    if value is None:
        return "null"
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "not text")


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(str, names)) or "none"
