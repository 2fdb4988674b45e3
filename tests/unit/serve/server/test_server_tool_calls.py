"""Tool calls and reasoning over HTTP.

No small model writes them when asked, so the engine is scripted here; all before and behind it is
the server's own.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from fivefold.engines.serve.completion import Completion, Timings
from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.server.app import make_app
from fivefold.engines.serve.server.engine_client import EngineClient, Sink
from fivefold.engines.serve.server.messages import EngineOptions, Ready, TokenizerRecord, Update
from fivefold.engines.serve.server.metrics import Metrics
from fivefold.engines.serve.server.pool import EnginePool
from fivefold.engines.serve.server.service import Service
from fivefold.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}]{{ message.content }}{% if message.tool_calls %}"
    "{{ message.tool_calls[0].function.arguments.city }}{% endif %}{% endfor %}[assistant]"
)
CALLS = (
    '<think>Two cities.</think>On it.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
HI: list[Any] = [{"role": "user", "content": "Weather in Oslo and Rome?"}]
STATE = EngineState(0, 0, 10, 0, 0, 0, 0, 0, 0)


class Scripted(EngineClient):
    """Writes one text, three characters a token, whatever it is asked."""

    def __init__(self, text: str) -> None:
        super().__init__(EngineOptions("none"))
        self.text = text
        self.prompt: list[int] = []

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> int:
        self.prompt = prompt
        loop = asyncio.get_running_loop()
        whole = Completion(self.text, [1], None, "stop", 0, len(prompt), Timings(0.0, 0.0, 1))
        for index in range(params.n):
            pieces = [self.text[i : i + 3] for i in range(0, len(self.text), 3)]
            for piece in pieces:
                loop.call_soon(sink, Update(0, index, piece, 1, None, None))
            end = Completion(**{**whole.__dict__, "index": index})
            loop.call_soon(sink, Update(0, index, "", 1, None, end))
        return 0


@pytest.fixture
def scripted() -> Scripted:
    return Scripted(CALLS)


@pytest.fixture
def client(scripted: Scripted) -> openai.AsyncOpenAI:
    tokenizer = Tokenizer.train_bpe(iter(["Weather in Oslo and Rome?"]), 300)
    record = TokenizerRecord.of(tokenizer)
    record = TokenizerRecord(record.pipeline, record.special_tokens, record.stop_ids, TEMPLATE)
    facts = Ready(record, 4096, 0, 300, 8, 1, "fp32", "cpu", 16, 10, 4, 0.0, STATE)
    pool = EnginePool(EngineOptions("none"))
    pool.clients = [scripted]
    service = Service(
        pool, facts, ["m"], 0, Metrics("m", pool), tool_format="hermes", reasoning_format="think"
    )
    transport = httpx.ASGITransport(make_app(service))
    return openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )


def ask(client: openai.AsyncOpenAI, **body: Any) -> Any:
    async def run() -> Any:
        answer = await client.chat.completions.create(model="m", messages=HI, **body)
        return [chunk async for chunk in answer] if body.get("stream") else answer

    return asyncio.run(run())


def test_calls_of_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    choice = ask(client, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Two cities."
    assert choice.message.content.strip() == "On it."
    called = [
        (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls
    ]
    assert called == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_calls_of_a_stream(client: openai.AsyncOpenAI) -> None:
    chunks = ask(client, tools=TOOLS, stream=True, n=2)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        deltas = [call for c in choices for call in c.delta.tool_calls or []]
        named = [(d.index, d.function.name) for d in deltas if d.id]
        assert named == [(0, "weather"), (1, "weather")]
        for number, city in enumerate(("Oslo", "Rome")):
            text = "".join(d.function.arguments for d in deltas if d.index == number)
            assert json.loads(text) == {"city": city}
        reasons = [c.finish_reason for c in choices if c.finish_reason]
        assert reasons == ["tool_calls"]
        thoughts = [getattr(c.delta, "reasoning_content", None) or "" for c in choices]
        assert "".join(thoughts) == "Two cities."


def test_one_call_at_a_time(client: openai.AsyncOpenAI) -> None:
    message = ask(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert [json.loads(c.function.arguments)["city"] for c in message.tool_calls] == ["Oslo"]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(client: openai.AsyncOpenAI, more: dict[str, Any]) -> None:
    choice = ask(client, **more).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert "<tool_call>" in choice.message.content


def test_tools_and_earlier_calls_reach_the_template(
    client: openai.AsyncOpenAI, scripted: Scripted
) -> None:
    tokenizer = Tokenizer.train_bpe(iter(["Weather in Oslo and Rome?"]), 300)
    calls = [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]  # fmt: skip
    messages: list[Any] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    asyncio.run(client.chat.completions.create(model="m", messages=messages, tools=TOOLS))
    told = tokenizer.decode(scripted.prompt)
    assert told.endswith("Rome?[assistant]Oslo[tool]rain[assistant]")
    assert json.loads(told[: told.index("[user]")]) == TOOLS


def test_the_whole_answer_does_not_depend_on_the_pieces(client: openai.AsyncOpenAI) -> None:
    message = ask(client, tools=TOOLS).choices[0].message
    chunks = ask(client, tools=TOOLS, stream=True)
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == message.content
    calls = [d for chunk in chunks for c in chunk.choices for d in c.delta.tool_calls or []]
    for number, call in enumerate(message.tool_calls):
        streamed = "".join(d.function.arguments for d in calls if d.index == number)
        assert streamed == call.function.arguments
