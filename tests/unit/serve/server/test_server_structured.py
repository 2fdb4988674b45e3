"""Answers of a given form over HTTP, asked for by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.forms import calls_form
from fivefold.engines.serve.server.parsers import make_parser
from fivefold.engines.serve.server.parsers.tool_calls import HERMES, LLAMA3_JSON
from fivefold.engines.serve.structured.grammars import Grammars, load
from fivefold.text.tokenizer import Tokenizer
from tests.unit.serve.server.real_server import NAME, TEXT, RealServer

HI: list[Any] = [{"role": "user", "content": "Once upon a time"}]


class Frog(pydantic.BaseModel):
    """What a client wants back."""

    colour: Literal["green", "blue"]
    legs: Literal[4, 6]
    tired: bool


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_pydantic_model_comes_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=NAME, messages=HI, response_format=Frog, max_completion_tokens=300, seed=3
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Frog)


def test_several_streams_at_once_keep_to_their_own_forms(server: RealServer) -> None:
    patterns = ["[ab]{3}", "[cd]{4}", None, "(ef){2}"]

    async def ask(client: openai.AsyncOpenAI, pattern: str | None) -> str:
        form = {} if pattern is None else {"structured_outputs": {"regex": pattern}}
        stream = await client.completions.create(
            model=NAME, prompt="Once", max_tokens=12, stream=True, seed=1, extra_body=form
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, p) for p in patterns))

    for pattern, text in zip(patterns, asyncio.run(run()), strict=True):
        assert pattern is None or re.fullmatch(pattern, text)


@pytest.mark.parametrize("n", [1, 3])
def test_one_of_several(client: openai.OpenAI, n: int) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=HI, n=n, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert {choice.message.content for choice in answer.choices} <= {"yes", "no"}


def test_the_next_request_is_answered_after_a_bad_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="root rule"):
        client.completions.create(
            model=NAME, prompt="a", extra_body={"structured_outputs": {"grammar": "a = b"}}
        )
    again = client.completions.create(model=NAME, prompt="a", max_tokens=2)
    assert again.choices[0].text is not None


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
TIME = {"name": "time", "parameters": {"type": "object", "properties": {"zone": {"const": "UTC"}},
                                       "required": ["zone"], "additionalProperties": False}}  # fmt: skip
TOOLS: list[dict[str, Any]] = [WEATHER, TIME]


def walk(form: Any, seed: int) -> str:
    """An answer that the form allows, a token at a time; as long as it likes to be."""
    import random

    tokenizer = Tokenizer.train_bpe(iter([*TEXT, "<tool_call> \n </tool_call>"]), 400)
    grammars, draw, text = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), random.Random(seed), b""  # fmt: skip
    assert tokenizer.spelling is not None
    matcher, mask = grammars.matcher(form), load().allocate_token_bitmask(1, tokenizer.vocab_size)
    for _ in range(2000):
        matcher.fill_next_token_bitmask(mask)
        allowed = [t for t in range(tokenizer.vocab_size) if mask[0, t // 32] >> (t % 32) & 1]
        ends = [token for token in allowed if token in tokenizer.eos_ids]
        visible = [t for t in allowed if tokenizer.spelling.bytes_of(t).strip()] or allowed
        token = ends[0] if ends and draw.random() < 0.7 else draw.choice(visible)
        matcher.accept_token(token)
        if token in tokenizer.eos_ids:
            break
        text += tokenizer.spelling.bytes_of(token)
    return text.decode()


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_forced_calls_are_calls(name: str, choice: Any) -> None:
    form = calls_form({"hermes": HERMES, "llama3_json": LLAMA3_JSON}[name], TOOLS, choice, True)
    for seed in range(6):
        parser = make_parser(name, None)
        text = walk(form, seed)
        pieces = [parser.push(text), parser.finish()]
        deltas = [delta for piece in pieces for delta in piece.tool_calls]
        assert not "".join(piece.content for piece in pieces).strip()
        names = [delta.name for delta in deltas if delta.name]
        assert names and set(names) <= ({"time"} if choice != "required" else {"time", "weather"})
        if len(names) == 1:
            schema = {"weather": WEATHER, "time": TIME}[names[0]]["parameters"]
            jsonschema.validate(json.loads("".join(d.arguments for d in deltas)), schema)


def test_strict_tools_bind_only_the_calls() -> None:
    strict = [{**WEATHER, "strict": True}, TIME]
    form = calls_form(HERMES, strict, "auto", True)
    matcher = Grammars(*_free()).matcher(form)
    free = "Hello, it rains. "
    for text, fits in [
        (free, True),
        (f'{free}<tool_call>\n{{"name": "weather", "arguments": {{"city": "Oslo"}}}}\n</tool_call>', True),
        (f'{free}<tool_call>\n{{"name": "weather", "arguments": {{"city": "Bonn"}}}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "time", "arguments": {"whatever": [1]}}\n</tool_call>', True),
    ]:  # fmt: skip
        matcher.reset()
        assert matcher.accept_string(text) is fits, text
    assert calls_form(HERMES, TOOLS, "auto", True) is None


def _free() -> tuple[Tokenizer, int, tuple[int, ...]]:
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 400)
    return tokenizer, tokenizer.vocab_size, tokenizer.eos_ids


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "function", "function": {"name": "wether"}}, "did you mean 'weather'"),
        ({"type": "function"}, "names no tool"),
        ({}, "names no tool"),
    ],
)
def test_a_choice_of_no_tool_is_named(choice: Any, told: str) -> None:
    with pytest.raises(APIError, match=told):
        calls_form(HERMES, TOOLS, choice, True)


def test_strict_without_marks_is_named() -> None:
    with pytest.raises(APIError, match="use tool_choice=required"):
        calls_form(LLAMA3_JSON, [{**WEATHER, "strict": True}], "auto", True)
