"""Whatever tokens a form allows, an answer made of them has the form: by other people's validators."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import PromptError
from fivefold.engines.serve.structured.form import MOST_CHARACTERS, StructuredOutputs
from fivefold.engines.serve.structured.grammars import Grammars, load
from fivefold.engines.serve.structured.schema import MOST_LEVELS, held
from fivefold.text.tokenizer import Tokenizer

TEXT = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"], "at": null, "ok": true}\n',
    "žluťoučký 你好",
]
LONGEST = 600
drawn = settings(deadline=None, derandomize=True, max_examples=120)


@cache
def grammars() -> Grammars:
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 340)
    # Three columns more than words, as models pad them.
    return Grammars(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)


def allowed(matcher: Any, words: int) -> list[int]:
    mask = load().allocate_token_bitmask(1, words)
    matcher.fill_next_token_bitmask(mask)
    bits = (mask[0][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    found: list[int] = bits.flatten()[:words].nonzero()[:, 0].tolist()
    return found


def walk(form: StructuredOutputs, seed: int) -> str | None:
    """An answer of tokens drawn among those that the form allows; None if it did not end."""
    known, draw, text = grammars(), random.Random(seed), b""
    assert known.tokenizer is not None and known.tokenizer.spelling is not None
    spell, matcher = known.tokenizer.spelling.bytes_of, known.matcher(form)
    for step in range(LONGEST):
        choices = allowed(matcher, known.vocab_size)
        assert choices, f"nothing goes on after {text!r}"
        assert max(choices) < known.tokenizer.vocab_size
        ends = [token for token in choices if token in known.end_tokens]
        if step > 40:  # home by the shortest way
            closing = [t for t in choices if spell(t) in (b'"', b"}", b"]", b"0", b",")]
            choices = closing if closing and draw.random() < 0.8 else choices
        token = ends[0] if ends and draw.random() < 0.6 else draw.choice(choices)
        assert matcher.accept_token(token)
        if token in known.end_tokens:
            return text.decode()
        text += spell(token)
    return None


numbers = st.integers(-50, 50)


@st.composite
def bounded(draw: Any, kind: str, low: str, high: str, values: Any = None) -> dict[str, Any]:
    first = draw(st.integers(0, 3) if values is None else values)
    second = first + draw(st.integers(0, 5))
    bounds = {low: first, high: second}
    return {"type": kind, **{k: v for k, v in bounds.items() if draw(st.booleans())}}


leaves = st.one_of(
    st.sampled_from([
        {"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"const": {"a": [1]}},
        {"type": "string"}, {"pattern": "^a+[0-9]{2}$"}, {"type": "number"}, True,
        {"type": "string", "enum": ["ä", 'q"uote', "line\nbreak"]}, {"enum": [1, None, "x"]},
        {"type": "string", "format": "date-time"}, {"type": "string", "format": "uuid"},
    ]),
    bounded("string", "minLength", "maxLength"),
    bounded("integer", "minimum", "maximum", numbers),
    bounded("number", "exclusiveMinimum", "maximum", numbers),
)  # fmt: skip


@st.composite
def objects(draw: Any, inner: Any) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "b c", "ü", 'd"']), unique=True, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": {n: draw(inner) for n in names}}
    schema["required"] = [n for n in names if draw(st.booleans())]
    others = draw(st.sampled_from([None, False, {"type": "boolean"}]))
    if others is not None:
        schema["additionalProperties"] = others
    if others is not False and draw(st.booleans()):
        schema["required"].append("unnamed")
    return schema


@st.composite
def arrays(draw: Any, inner: Any) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"type": "array", "prefixItems": [draw(inner), draw(inner)], "items": False}
    return {**draw(bounded("array", "minItems", "maxItems")), "items": draw(inner)}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a: {"$defs": {"x": a}, "$ref": "#/$defs/x"}, inner),
        st.builds(lambda a: {"allOf": [a]}, inner),
    ),
    max_leaves=5,
)


def refers_from_the_top(schema: Any) -> bool:
    """`#` is the outermost schema: only there can what was drawn find its definitions."""
    return json.dumps(schema).count('"$ref"') == ("$ref" in schema)


@drawn
@given(schemas.filter(lambda s: isinstance(s, dict) and refers_from_the_top(s)), st.integers(0, 9))
def test_json_of_a_schema(schema: dict[str, Any], seed: int) -> None:
    try:
        answer = walk(StructuredOutputs(json=schema), seed)
    except PromptError as error:  # an array of at most no items, a number in an empty range
        assert "cannot be read" in error.message
        return
    if answer is not None:
        jsonschema.validate(json.loads(answer), schema, cls=jsonschema.Draft202012Validator)


def test_most_walks_end() -> None:
    """Else the test above would hold of nothing."""
    schema = {
        "type": "object", "required": ["name", "tags"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        },
    }  # fmt: skip
    answers = [walk(StructuredOutputs(json=json.dumps(schema)), seed) for seed in range(20)]
    whole = [json.loads(answer) for answer in answers if answer is not None]
    assert len(whole) > 15
    assert all(set(w) == {"name", "tags"} and len(w["name"]) <= 9 for w in whole)


def test_any_object() -> None:
    found = [walk(StructuredOutputs(json_object=True), seed) for seed in range(20)]
    assert sum(isinstance(json.loads(f), dict) for f in found if f is not None) > 10


@pytest.mark.parametrize("pattern", [r"\d{4}-[01]\d", "(yes|no)!*", "[^a]b?", "ä+你"])
def test_a_regular_expression(pattern: str) -> None:
    for seed in range(10):
        answer = walk(StructuredOutputs(regex=pattern), seed)
        assert answer is None or re.fullmatch(pattern, answer)


def test_one_of_several() -> None:
    texts = ["yes", "no", 'a "quoted"\nline', "你好", "back\\slash", "😀!"]
    form = StructuredOutputs(choice=texts)
    assert {walk(form, seed) for seed in range(60)} == set(texts)


def test_a_grammar() -> None:
    form = StructuredOutputs(grammar='root ::= "<" word ">"\nword ::= [a-c] word | [a-c]')
    for seed in range(10):
        answer = walk(form, seed)
        assert answer is None or re.fullmatch("<[abc]+>", answer)


def test_marks_with_json_between_them() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3}},
              "required": ["x"], "additionalProperties": False}  # fmt: skip
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    form = StructuredOutputs(structural_tag={"type": "structural_tag", "format": tag})
    for seed in range(10):
        answer = walk(form, seed)
        assert answer is not None
        marked = re.fullmatch("<call>(.*)</call>", answer, re.S)
        assert marked is not None
        jsonschema.validate(json.loads(marked[1]), schema)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({}, "is empty; give one of json"),
    ({"json": {}, "regex": "a"}, "has json and regex"),
    ({"json": "{"}, "the schema is no JSON"),
    ({"json": "[1]"}, r"the schema is \[1\]"),
    ({"json": {"a": {1}}}, "the schema is no JSON"),
    ({"json": {"a": float("nan")}}, "the schema is no JSON"),
    ({"json_object": False}, "asks for nothing"),
    ({"regex": ""}, "no text"),
    ({"regex": "a" * (MOST_CHARACTERS + 1)}, f"at most {MOST_CHARACTERS}"),
    ({"grammar": 5}, "no text"),
    ({"choice": "yes"}, "no list of texts"),
    ({"choice": []}, "no list of texts"),
    ({"choice": ["a", ""]}, "no list of texts"),
    ({"choice": ["a"] * 5000}, "at most 4096"),
    ({"structural_tag": "x"}, "no JSON"),
]


@pytest.mark.parametrize(("given", "told"), FORMS)
def test_a_form_is_one_thing(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PromptError, match=told) as caught:
        StructuredOutputs(**given)
    assert "\n" not in str(caught.value)


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "parenthesis is not closed"),
    ({"grammar": "root = x"}, 'root rule with name "root" is not found'),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"$ref": "#/$defs/none"}}, "none|Cannot find"),
    ({"json": {"enum": []}}, "must not be empty"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "x"}}}, "cannot be read"),
]


@pytest.mark.parametrize(("given", "told"), UNREADABLE)
def test_what_cannot_be_read_is_refused_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PromptError, match=told) as caught:
        grammars().matcher(StructuredOutputs(**given))
    assert "\n" not in str(caught.value)
    assert ".cc" not in str(caught.value)


SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {}}, "the schema has not"),
    ({"properties": {"a": {"uniqueItems": True}}}, "schema.properties.a has uniqueItems"),
    ({"items": {"contains": {}}}, "schema.items has contains"),
    ({"if": {}, "then": {}}, "has if"),
    ({"minimun": 3}, "has minimun; did you mean minimum"),
    ({"$ref": "#/$defs/a", "minimum": 5}, "minimum beside \\$ref; put it inside"),
    ({"type": "object", "anyOf": [{}]}, "type beside anyOf"),
    ({"anyOf": [{}], "oneOf": [{}]}, "oneOf beside anyOf"),
    ({"allOf": [{}, {}]}, "allOf of several"),
    ({"anyOf": []}, "anyOf is no list"),
    ({"anyOf": [{"pattern": "a", "maxLength": 3}]}, r"anyOf\[0\] has pattern beside maxLength"),
    ({"$ref": "https://example.com/x"}, "refers to 'https"),
    ({"type": "integer", "enum": [1, "a"]}, "the value 'a', which is not of its type"),
    ({"type": "integer", "const": True}, "the value True"),
    ({"enum": "abc"}, "give a list of values"),
    ({"minimum": 1, "minLength": 1}, "strings and numbers alike; give it a type"),
    ({"required": ["a"], "additionalProperties": False}, "requires 'a'"),
    ({"required": "a"}, "give a list of names"),
    ({"properties": [1]}, "is no object"),
    ({"items": [{}]}, "schema.items is"),
]


@pytest.mark.parametrize(("schema", "told"), SCHEMAS)
def test_schemas_that_answers_cannot_be_held_to(schema: Any, told: str) -> None:
    with pytest.raises(PromptError, match=told) as caught:
        held(schema)
    assert "\n" not in str(caught.value)


def test_a_schema_without_a_bottom_is_refused() -> None:
    schema: Any = {}
    for _ in range(MOST_LEVELS + 2):
        schema = {"items": schema}
    with pytest.raises(PromptError, match="levels deep"):
        held(schema)


def test_annotations_and_unknown_words_are_left_alone() -> None:
    schema = {"title": "T", "description": "d", "default": 3, "x-order": 1, "type": "integer"}
    assert held(schema) == schema


def test_without_xgrammar_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(PromptError, match=r"pip install 'fivefold\[structured\]'"):
        grammars().matcher(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("ends", [(), (0,)])
def test_models_that_cannot_be_bound_are_named(ends: tuple[int, ...]) -> None:
    tokenizer = grammars().tokenizer if not ends else None
    with pytest.raises(PromptError, match=r"no end-of-sequence token|needs a tokenizer"):
        Grammars(tokenizer, 400, ends).matcher(StructuredOutputs(regex="a"))
