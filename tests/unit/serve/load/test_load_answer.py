"""Reading of streams: any cut, any clock, any nonsense."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.load.answer import AnswerReader, StreamError, error_message
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.sse import EventDecoder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "usage", "text", "delta", "content", "finish_reason",
                         "prompt_tokens", "completion_tokens", "prompt_tokens_details", "error"]),
        inner, max_size=4,
    ), max_leaves=12,
)  # fmt: skip


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": reason}]})


def chat(delta: dict[str, object], reason: str | None = None) -> bytes:
    return event({"choices": [{"delta": delta, "finish_reason": reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6,
                                        "prompt_tokens_details": {"cached_tokens": 4}}})  # fmt: skip
DONE = b"data: [DONE]\n\n"


def outcome_of(reader: AnswerReader, scheduled: float = 0.0) -> Outcome:
    outcome = Outcome(0, scheduled, scheduled, scheduled)
    reader.fill(outcome)
    return outcome


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.sampled_from([b"data: a", b"data:b", b": ping", b"event: x", b"", b"", b"data"])),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_events_do_not_depend_on_where_bytes_are_cut(
    lines: list[bytes], ending: bytes, cuts: list[int]
) -> None:
    stream = b"".join(line + ending for line in lines)
    whole = EventDecoder()
    expected = whole.push(stream) + whole.finish()
    pieces, decoder = EventDecoder(), []
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in pairwise(places):
        decoder += pieces.push(stream[begin:end])
    assert decoder + pieces.finish() == expected
    slow = EventDecoder()
    slowly = [data for place in range(len(stream)) for data in slow.push(stream[place : place + 1])]
    assert slowly + slow.finish() == expected
    assert b"".join(expected).count(b"a") == lines.count(b"data: a")


def test_times_are_those_of_tokens() -> None:
    reader = AnswerReader()
    for now, data in (
        (1.0, piece("a")), (1.5, piece("")), (1.75, piece("b") + piece("c")),
        (3.0, piece("", "length")), (3.5, USAGE + DONE),
    ):  # fmt: skip
        reader.push(data, now)
    reader.finish(4.0)
    outcome = outcome_of(reader, scheduled=0.25)
    assert (outcome.first, outcome.last, outcome.gaps) == (1.0, 1.75, [0.5, 0.25, 0.0])
    assert (outcome.ttft, outcome.e2e) == (0.75, 1.5)
    assert outcome.tpot == pytest.approx(0.75 / 5)  # 6 tokens in 4 pieces
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (9, 6, 4)
    assert (outcome.counted_by, outcome.finish_reason) == ("usage", "length")


def test_pieces_stand_for_tokens_without_usage() -> None:
    reader = AnswerReader()
    reader.push(piece("a") + piece("b", "stop"), 1.0)
    reader.finish(2.0)
    outcome = outcome_of(reader)
    assert (outcome.completion_tokens, outcome.counted_by, outcome.prompt_tokens) == (
        2,
        "pieces",
        None,
    )


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_a_chat_begins_with_its_first_words_not_with_the_role(name: str) -> None:
    reader = AnswerReader()
    reader.push(chat({"role": "assistant", "content": ""}), 1.0)
    assert reader.first is None
    reader.push(chat({name: "x"}), 2.0)
    reader.push(chat({"content": ""}), 3.0)  # half a character
    reader.push(chat({}, "stop") + DONE, 4.0)
    reader.finish(4.0)
    assert (reader.first, reader.last, reader.pieces) == (2.0, 3.0, 2)


def test_tokens_without_text_came_with_the_end() -> None:
    reader = AnswerReader()
    reader.push(chat({"role": "assistant", "content": ""}), 1.0)
    reader.push(chat({}, "length") + USAGE + DONE, 2.0)
    reader.finish(2.5)
    outcome = outcome_of(reader)
    assert (outcome.ttft, outcome.e2e, outcome.completion_tokens) == (2.5, 2.5, 6)


def test_the_last_event_may_lack_its_empty_line() -> None:
    reader = AnswerReader()
    reader.push(piece("a") + b"data: [DONE]", 1.0)
    reader.finish(1.0)
    assert reader.done


@pytest.mark.parametrize(
    ("stream", "kind", "detail"),
    [
        (piece("a"), "cut short", "after 1 pieces"),
        (b"", "cut short", "after 0 pieces"),
        (DONE, "no tokens", ""),
        (b"data: {oh\n\n", "bad stream", "no JSON: {oh"),
        (b"data: 3\n\n", "bad stream", "no object: 3"),
        (event({"choices": [3]}), "bad stream", "no object"),
        (event({"error": {"message": "the engine\ndied"}}), "error event", "the engine died"),
        (event({"error": "plain"}), "error event", "plain"),
    ],
)
def test_streams_that_are_no_answers(stream: bytes, kind: str, detail: str) -> None:
    reader = AnswerReader()
    with pytest.raises(StreamError) as error:
        reader.push(stream, 0.0)
        reader.finish(0.0)
    assert error.value.kind == kind and detail in error.value.detail


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(JSON, max_size=4))
def test_no_nonsense_raises_anything_else(chunks: list[object]) -> None:
    reader = AnswerReader()
    try:
        for chunk in chunks:
            reader.push(event(chunk), 1.0)
        reader.finish(1.0)
    except StreamError as error:
        assert error.kind and "\n" not in error.detail
    outcome = outcome_of(reader)
    assert outcome.completion_tokens >= 0
    assert error_message({"error": chunks}) is not None
