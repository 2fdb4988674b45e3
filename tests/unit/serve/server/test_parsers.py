"""Tool calls and reasoning in streamed text: the same whatever pieces it comes in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import ConfigError
from fivefold.engines.serve.server.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Piece,
    guess_formats,
    make_parser,
)
from fivefold.text.chat import CHATML

Formats = tuple[str | None, str | None]
FORMATS: list[Formats] = [(t, r) for t in (None, *TOOL_FORMATS) for r in (None, *REASONING_FORMATS)]
WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2.5e3]}}'
ARGUMENTS = '{"city": "Paris", "days": [1, 2.5e3]}'


@dataclass
class Whole:
    """What the pieces add up to; calls are (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.name is not None:
                assert delta.id and delta.index == len(self.calls)
                self.calls.append((delta.name, ""))
            assert delta.index == len(self.calls) - 1
            assert delta.name is not None or (delta.id is None and delta.arguments)
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + delta.arguments)


def parse(pieces: list[str], formats: Formats, prompt: str = "") -> Whole:
    parser = make_parser(*formats, prompt)
    whole = Whole()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish())
    return whole


def hermes(text: str) -> Whole:
    return parse([text], ("hermes", None))


def llama(text: str) -> Whole:
    return parse([text], ("llama3_json", None))


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


# Calls ---------------------------------------------------------------------------------------


def test_a_call_of_hermes() -> None:
    assert hermes(tagged(WEATHER)) == Whole("", "", [("weather", ARGUMENTS)])


def test_several_calls_and_text_around_them() -> None:
    text = f"Let me see.\n{tagged(WEATHER)}\n{tagged(WEATHER)}\n"
    assert hermes(text) == Whole("Let me see.", "", [("weather", ARGUMENTS)] * 2)
    assert hermes(text + "Done. ").content == "Let me see.\nDone."
    assert hermes(f"\n{tagged(WEATHER)}\n Done.").content == "Done."


@pytest.mark.parametrize("opening", ["", "<|python_tag|>", "\n\n", "<|python_tag|> "])
def test_a_call_of_llama(opening: str) -> None:
    body = '{"name": "weather", "parameters": {"city": "Paris"}}'
    assert llama(opening + body) == Whole("", "", [("weather", '{"city": "Paris"}')])
    two = llama(f"{opening}{body}; {body}")
    assert two == Whole("", "", [("weather", '{"city": "Paris"}')] * 2)
    assert llama(f"{opening}{body}\nDone") == Whole("Done", "", [("weather", '{"city": "Paris"}')])


def test_llama_calls_in_the_midst_of_text_only_after_the_tag() -> None:
    assert llama(f"So: {WEATHER}") == Whole(f"So: {WEATHER}")
    assert llama(f"So: <|python_tag|>{WEATHER}") == Whole("So:", "", [("weather", ARGUMENTS)])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null, "id": 7}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"type": "function", "name": "f", "parameters": {"a": {"b": []}}}', '{"a": {"b": []}}'),
        (r'{"name": "f", "arguments": "{\"a\": \"\\n\"}"}', r'{"a": "\n"}'),
        ('{"name": "f", "arguments": {"a": "one\n\ttwo\x01"}}', r'{"a": "one\n\ttwo\u0001"}'),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
        ('{"name": "f", "arguments": {"a": 1}, "extra": [2]}', '{"a": 1}'),
        (r'{"name": "\u0066", "arguments": {"ä": "\ud83d\ude00"}}', r'{"ä": "\ud83d\ude00"}'),
    ],
)
def test_forms_of_a_call(body: str, arguments: str) -> None:
    assert hermes(tagged(body)) == Whole("", "", [("f", arguments)])
    json.loads(arguments)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather()",
        "[]",
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        r'{"name": "\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": NaN}',
        '{"name": "f", "arguments": "nothing"}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "args": {"a": 1}}',
        '{"arguments": {"a": 1}}',
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": ',
        '{"name": "f"',
    ],
)
def test_what_is_no_call_is_given_back(body: str) -> None:
    for text in (tagged(body), f"See:  {tagged(body)} so", f"<tool_call>{body}"):
        assert hermes(text) == Whole(text)
    for text in (f"<|python_tag|>{body}", body):
        assert llama(text) == Whole(text)


def test_other_json_is_an_answer_not_a_call() -> None:
    for text in ('{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"city": "Paris"}\n', "{}", " "):
        assert llama(text) == Whole(text)


def test_a_call_after_a_broken_one_counts() -> None:
    text = f"<tool_call>no <tool_call>{WEATHER}</tool_call>"
    assert hermes(text) == Whole("<tool_call>no", "", [("weather", ARGUMENTS)])


def test_a_call_that_breaks_in_its_arguments_keeps_their_valid_beginning() -> None:
    found = hermes('<tool_call>{"name": "f", "arguments": {"a": 1, b}}</tool_call> so')
    assert found == Whole("b}}</tool_call> so", "", [("f", '{"a": 1, ')])


def test_a_call_cut_off_by_the_length_limit() -> None:
    assert hermes('<tool_call>{"name": "f", "arguments": {"a": "be').calls == [("f", '{"a": "be')]
    assert hermes(f"<tool_call>{WEATHER}").calls == [("weather", ARGUMENTS)]
    assert hermes(f"<tool_call>{WEATHER}</tool").content == "</tool"


def test_arguments_stream() -> None:
    parser = make_parser("hermes", None)
    parser.push('<tool_call>{"name": "f", "arguments"')
    first = parser.push(': {"a": "long').tool_calls
    assert [(call.name, call.arguments) for call in first] == [("f", '{"a": "long')]
    assert parser.push(" text").tool_calls[0].arguments == " text"


def test_deep_and_long_arguments_end() -> None:
    deep = "[" * 20_000 + "]" * 20_000
    found = hermes(tagged(f'{{"name": "f", "arguments": {{"a": {deep}, "b": {"9" * 20_000}}}}}'))
    assert found.content == "" and len(found.calls[0][1]) > 60_000


# Reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes. <think> is a tag", "", "Yes. <think> is a tag"),
        ("<think>Hm.\n</thin", "Hm.\n</thin", ""),
        ("Yes. <think>Hm.</think>", "", "Yes. <think>Hm.</think>"),
        ("  <thi", "", "  <thi"),
        ("<think>a</think>\n  indented", "a", "  indented"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    assert parse([text], (None, "think")) == Whole(content, reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("Hm.", "Hm.", ""),
        ("<th", "<th", ""),
        ("</think>Yes.", "", "Yes."),
    ],
)
def test_reasoning_that_the_prompt_opened(text: str, reasoning: str, content: str) -> None:
    assert parse([text], (None, "think_opened")) == Whole(content, reasoning)
    assert parse([text], (None, "think"), "<|assistant|><think>\n") == Whole(content, reasoning)


def test_a_prompt_that_closed_the_reasoning_leaves_none() -> None:
    for form in REASONING_FORMATS:
        assert parse(["Yes."], (None, form), "<think>\n\n</think>\n\n") == Whole("Yes.")


def test_calls_are_not_looked_for_in_reasoning() -> None:
    text = f"<think>{tagged(WEATHER)}</think>\n{tagged(WEATHER)}"
    found = parse([text], ("hermes", "think"))
    assert found == Whole("", tagged(WEATHER), [("weather", ARGUMENTS)])


# Pieces --------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<", "tool_call>",
        "\n", " ", ";", "{", "}", '"', "\\", "[", "]", ":", ",", "-", "1", "e", "null", "true", "a",
        WEATHER, tagged(WEATHER), '{"name": "f", "parameters": ', '{"a": "b\n"}', '"name"', "é😀",
        '"arguments"', '{"name": "f"}', '{"arguments": "{}", ', "0.5",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(TEXTS, st.sampled_from(FORMATS), st.lists(st.integers(0, 80), max_size=12))
def test_any_pieces_give_the_same(text: str, formats: Formats, cuts: list[int]) -> None:
    whole = parse([text], formats)
    assert parse(list(text), formats) == whole
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in pairwise(edges)], formats) == whole


@pytest.mark.parametrize("formats", FORMATS)
def test_every_cut_in_two_or_three(formats: Formats) -> None:
    body = '{"name": "f", "arguments": {"a": [1.5, "x\\n"]}}'
    text = f"<think>\nHm\n</think>\nSo\n{tagged(body)}\n<|python_tag|>{body}; {body}<tool_call>x"
    whole = parse([text], formats)
    for first in range(len(text) + 1):
        assert parse([text[:first], text[first:]], formats) == whole
        for length in (1, 2, 11):
            middle = text[first : first + length]
            assert parse([text[:first], middle, text[first + length :]], formats) == whole


@settings(deadline=None, derandomize=True, max_examples=300)
@given(TEXTS, st.sampled_from(FORMATS))
def test_arguments_are_the_beginning_of_json_and_nothing_else_is_lost(
    text: str, formats: Formats
) -> None:
    found = parse([text], formats)
    for _, arguments in found.calls[:-1]:
        assert arguments.startswith("{")
    if not found.calls and not found.reasoning and formats[1] is None:
        assert found.content == text
    given_letters = sum(map(len, (found.content, found.reasoning)))
    assert given_letters <= len(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), JSON_VALUES, max_size=5),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sampled_from(TOOL_FORMATS),
)
def test_every_call_comes_through(
    name: str, arguments: dict[str, object], ascii_only: bool, indent: int | None, form: str
) -> None:
    key = "arguments" if form == "hermes" else "parameters"
    body = json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only, indent=indent)
    found = parse(list(tagged(body) if form == "hermes" else body), (form, None))
    assert (found.content, found.calls[0][0]) == ("", name)
    assert json.loads(found.calls[0][1]) == arguments


# Formats -------------------------------------------------------------------------------------


def test_names_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match="tool format herms is unknown; did you mean 'hermes'"):
        make_parser("herms", None)
    with pytest.raises(ConfigError, match="reasoning format thought"):
        make_parser(None, "thought")


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        (None, (None, None)),
        (CHATML, (None, None)),
        (CHATML + "{{ '<tool_call>' }}", ("hermes", None)),
        (CHATML + "{{ '<tool_call>\\n<function=name>' }}", (None, None)),
        (CHATML + "{# <|python_tag|> #}", ("llama3_json", None)),
        (CHATML + "{{ '<think>\\n' }}", (None, "think_opened")),
        (CHATML + "{{ '<tool_call><think>\\n\\n</think>\\n\\n' }}", ("hermes", "think")),
        (CHATML + "{# <think> #}{{ raise_exception('no') }}", (None, "think")),
    ],
)
def test_formats_from_templates(template: str | None, formats: Formats) -> None:
    assert guess_formats(template) == formats
