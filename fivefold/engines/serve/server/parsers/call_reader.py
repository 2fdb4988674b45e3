"""One call of a tool, `{"name": ..., "arguments": {...}}`, read as it arrives."""

from __future__ import annotations

import json

from fivefold.engines.serve.server.parsers.json_text import WHITESPACE, Expects, JsonText

ARGUMENTS = ("arguments", "parameters")
"""What Hermes and Qwen, and what Llama call the member that holds the arguments."""
REMARKS = ("name", "type", "id")
"""Members that a call without arguments may have."""
_ENDED = (Expects.COMMA_OR_END, Expects.NAME, Expects.NOTHING)


class CallReader:
    """Takes text up to the closing brace, or to the first character that fits no call.

    The call has `begun` when its name is known and the object of its arguments opens, or else
    with the closing brace. Until then `text` is what to give back should it be no call after all.
    `lenient`: a call without arguments counts as one.
    """

    def __init__(self, *, lenient: bool) -> None:
        self.lenient = lenient
        self.begun = False
        self.ended = False
        """Whether the closing brace was read."""
        self._json = JsonText()
        self._text: list[str] = []
        self._new: list[str] = []
        self._members: dict[str, str] = {}
        self._member = ""
        self._part: list[str] | None = None
        self._streams = False

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._text)

    @property
    def name(self) -> str | None:
        """The tool's name, once it was read."""
        name = _string(self._members.get("name", ""))
        return name or None

    def read(self, text: str) -> int:
        """Take characters while they fit; how many were taken."""
        for place, char in enumerate(text):
            if self.ended or not self._accept(char):
                return place
            self._text.append(char)
        return len(text)

    def take(self) -> str:
        """Arguments that arrived since this was last asked, as JSON text."""
        new, self._new = "".join(self._new), []
        return new

    def _accept(self, char: str) -> bool:
        json_text = self._json
        depth, expected = json_text.depth, json_text.expects
        if depth == 0 and char not in "{" + WHITESPACE:
            return False
        kept = json_text.accept(char)
        if kept is None:
            return False
        if depth == 1 and expected is Expects.VALUE and char not in WHITESPACE:
            self._begin_value(char)
        elif depth == 1 and char == '"' and json_text.expects is Expects.STRING and not self._part:
            self._part = []
        if self._part is not None:
            self._part.append(kept)
        if self._streams:
            self._new.append(kept)
        if json_text.depth <= 1:
            self._end_part()
        return True

    def _begin_value(self, char: str) -> None:
        self._part = []
        is_arguments = self._member in ARGUMENTS and char == "{"
        if is_arguments and not self.begun and self.name is not None:
            self.begun = self._streams = True

    def _end_part(self) -> None:
        """After a character of the outer object: it may have ended a member's name or value."""
        expects = self._json.expects
        if self._part is not None and expects is Expects.COLON:
            self._member, self._part = _string("".join(self._part)) or "", None
        elif self._part is not None and expects in _ENDED:
            self._members.setdefault(self._member, "".join(self._part))
            self._part, self._streams = None, False
        if expects is Expects.NOTHING:
            self.ended = True
            if not self.begun:
                self._begin_late()

    def _begin_late(self) -> None:
        """The whole object is known, and its arguments did not stream."""
        arguments = self._whole_arguments()
        if self.name is not None and arguments is not None:
            self.begun = True
            self._new = [arguments]

    def _whole_arguments(self) -> str | None:
        given = next((self._members[key] for key in ARGUMENTS if key in self._members), None)
        if given is None:
            return "{}" if self.lenient and self._members.keys() <= {*REMARKS} else None
        if given.startswith("{"):
            return given
        if given.startswith("null"):
            return "{}"
        return _object(_string(given))  # some models write the object into a string


def _string(literal: str) -> str | None:
    """The text of a JSON string; None for what is none, or has half a character in it."""
    if not literal.startswith('"'):
        return None
    text: str = json.loads(literal)
    return None if any("\ud800" <= char <= "\udfff" for char in text) else text


def _object(text: str | None) -> str | None:
    """The text of a JSON object, its control characters mended; None for what is none."""
    if text is None or not text.strip():
        return None if text is None else "{}"
    json_text = JsonText()
    kept = [json_text.accept(char) for char in text.strip()]
    whole = [char for char in kept if char is not None]
    complete = len(whole) == len(kept) and json_text.expects is Expects.NOTHING
    return "".join(whole) if complete and whole[0] == "{" else None
