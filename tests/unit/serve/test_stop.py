from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.stop import StopMatcher

# Two letters make overlaps between text, stops and pieces frequent.
TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read the definition aloud: the first character that completes a stop string ends the text."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(deadline=None, derandomize=True, max_examples=1500)
@given(TEXT, STOPS, st.lists(st.integers(0, 24), max_size=8), st.booleans())
def test_any_chunking_gives_the_defined_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown = [matcher.push(piece) for piece in pieces(text, cuts)]
    final = "".join(shown) + matcher.finish()
    assert (final, matcher.stopped) == expected(text, stops, include)


@settings(deadline=None, derandomize=True, max_examples=1500)
@given(TEXT, STOPS)
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str]) -> None:
    """Whatever text follows, what was shown so far stays a beginning of the final text."""
    matcher = StopMatcher(stops)
    shown = ""
    for position, letter in enumerate(text):
        shown += matcher.push(letter)
        for follows in ("", "a", "b", "aa", "ab", "ba", "bb", "abab", "bbbb"):
            assert expected(text[: position + 1] + follows, stops, False)[0].startswith(shown)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(TEXT, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(letter) for letter in text)
    held = matcher.finish()
    if matcher.stopped is None:
        assert shown + held == text
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_pieces_is_not_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(p) for p in ("Hello", " there\n", "Us", "er: hi")] == [
        "Hello", " there", "", "",
    ]  # fmt: skip
    assert matcher.stopped == "\nUser:"
    assert matcher.push("more") == ""


def test_a_false_alarm_is_released() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("1 </ans") == "1 "
    assert matcher.push("ert>") == "</ansert>"
