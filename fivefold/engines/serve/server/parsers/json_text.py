"""JSON read character by character, so that a beginning can be told from what is no JSON."""

from __future__ import annotations

from enum import Enum, auto

from fivefold.engines.serve.server.parsers.json_word import COMPLETE, NEXT

WHITESPACE = " \t\n\r"


class Expects(Enum):
    """What may follow, beside white space."""

    VALUE = auto()
    ITEM_OR_END = auto()
    """After `[`."""
    NAME_OR_END = auto()
    """After `{`."""
    NAME = auto()
    """After a comma in an object."""
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    """More of a string, its closing quote included."""
    WORD = auto()
    """More of a number, or of true, false, null."""
    NOTHING = auto()
    """The value is complete."""


_BEFORE_NAME = (Expects.NAME, Expects.NAME_OR_END)
_BEFORE_VALUE = (Expects.VALUE, Expects.ITEM_OR_END)
_BEFORE_END = (Expects.ITEM_OR_END, Expects.NAME_OR_END, Expects.COMMA_OR_END)
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class JsonText:
    """One value of strict JSON (RFC 8259), as far as it was read.

    One thing that models do is mended: a control character in a string, say a line break, becomes
    its escape.
    """

    def __init__(self) -> None:
        self.expects = Expects.VALUE
        self._closings: list[str] = []
        self._string_is_name = False
        self._escape = ""
        self._word = ""

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._closings)

    def accept(self, char: str) -> str | None:
        """The next character, as JSON writes it. None if it cannot follow: then no more can."""
        if self.expects is Expects.STRING:
            return self._in_string(char)
        if self.expects is Expects.WORD:
            longer = NEXT[self._word].get(char)
            if longer is not None:
                self._word = longer
                return char
            if self._word not in COMPLETE:
                return None
            self._complete_value()
        return char if char in WHITESPACE or self._between(char) else None

    def _between(self, char: str) -> bool:
        """Take a character outside strings and words, if it can follow."""
        expects = self.expects
        if char == '"' and expects in (*_BEFORE_NAME, *_BEFORE_VALUE):
            self._string_is_name = expects in _BEFORE_NAME
            self.expects = Expects.STRING
        elif char == ":" and expects is Expects.COLON:
            self.expects = Expects.VALUE
        elif char == "," and expects is Expects.COMMA_OR_END:
            self.expects = Expects.NAME if self._closings[-1] == "}" else Expects.VALUE
        elif char in "}]" and expects in _BEFORE_END and self._closings[-1] == char:
            self._closings.pop()
            self._complete_value()
        elif expects in _BEFORE_VALUE:
            return self._begin_value(char)
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        """Anything but a string."""
        if char == "{":
            self._closings.append("}")
            self.expects = Expects.NAME_OR_END
        elif char == "[":
            self._closings.append("]")
            self.expects = Expects.ITEM_OR_END
        elif char in NEXT[""]:
            self._word = NEXT[""][char]
            self.expects = Expects.WORD
        else:
            return False
        return True

    def _complete_value(self) -> None:
        self.expects = Expects.COMMA_OR_END if self._closings else Expects.NOTHING

    def _in_string(self, char: str) -> str | None:
        if self._escape:
            return char if self._in_escape(char) else None
        if char == "\\":
            self._escape = char
        elif char == '"' and self._string_is_name:
            self.expects = Expects.COLON
        elif char == '"':
            self._complete_value()
        elif char < " ":
            return _SHORT_ESCAPES.get(char) or f"\\u{ord(char):04x}"
        return char

    def _in_escape(self, char: str) -> bool:
        if char not in ('"\\/bfnrtu' if self._escape == "\\" else "0123456789abcdefABCDEF"):
            return False
        self._escape += char
        if len(self._escape) == (6 if self._escape[1] == "u" else 2):
            self._escape = ""
        return True
