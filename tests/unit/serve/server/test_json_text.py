"""JSON character by character agrees with Python's own reader."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.server.parsers.json_text import Expects, JsonText

TOKENS = st.sampled_from(
    [*'{}[],:"-+.eE0123 \n\\u', "true", "false", "null", "nul", '""', '"a"', '"a":', '"\\u00e9"',
     "0.5", "1e+9", "-0", "01", "[1,", "{}", "[]"]
)  # fmt: skip


def read(text: str) -> tuple[str | None, bool]:
    """What is kept of a text, None when it is no beginning of JSON; whether it is complete.

    A number at the end may go on, so a space comes after the text.
    """
    json_text, kept = JsonText(), ""
    for char in text + " ":
        more = json_text.accept(char)
        if more is None:
            return None, False
        kept += more
    return kept[:-1], json_text.expects is Expects.NOTHING


def is_json(text: str) -> bool:
    """Whether Python reads it, control characters in strings allowed."""
    try:
        json.loads(text, strict=False)
    except ValueError:
        return False
    return True


@settings(deadline=None, derandomize=True, max_examples=600)
@given(st.lists(TOKENS, max_size=9).map("".join))
@example("[1.,2]")
@example("[-]")
@example("[1.5e3, 0, -0.0E-7, 1e]")
@example('{"a": [tru]}')
@example('{"a" 1}')
@example('"\\x"')
@example('"\\u12g4"')
@example('{"a": 1,}')
@example("[1}")
def test_complete_is_what_python_reads(text: str) -> None:
    kept, complete = read(text)
    assert complete == is_json(text)
    if complete:
        assert kept is not None
        assert json.loads(kept) == json.loads(text, strict=False)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False)))
def test_all_json_is_read_and_kept(value: list[object]) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert read(text) == (text, True)
        for end in range(len(text)):
            assert not read(text[:end])[1]


def test_control_characters_in_strings_become_escapes() -> None:
    kept, complete = read('"a\nb\t\x00"')
    assert (kept, complete) == (r'"a\nb\t\u0000"', True)
