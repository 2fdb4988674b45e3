"""The official client against a real server: what its users call, and the errors it raises."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from fivefold import LLM, SamplingParams
from fivefold.model.attention_backend import CausalAttention
from tests.unit.serve.server.real_server import CONTEXT, NAME, RealServer, open_tiny

HI = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    decoder, tokenizer = open_tiny(tiny)
    return LLM(decoder, tokenizer, num_blocks=200, max_sequences=8, token_budget=64)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
        client.models.retrieve("gpt-9")


def test_a_chat_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=10)
    expected = llm.chat(HI, params, progress=False)[0]
    asked = {"model": NAME, "messages": HI, "max_completion_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].usage == answer.usage


def test_log_probabilities_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    asked = {"model": NAME, "messages": HI, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    expected = llm.chat(HI, SamplingParams(max_new_tokens=5, logprobs=3), progress=False)[0]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    spelling = llm.engine.tokenizer.spelling
    own = [list(spelling.bytes_of(id)) for id in expected.token_ids]
    assert [token.bytes for token in content] == own
    for token, step, id in zip(content, expected.logprobs or [], expected.token_ids, strict=True):
        assert token.logprob == pytest.approx(step[id].logprob, abs=1e-4)
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # greedy
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        token
        for chunk in chunks
        if (logprobs := chunk.choices[0].logprobs) is not None
        for token in logprobs.content or []
    ]
    assert streamed == content


def test_parts_roles_and_several_answers(client: openai.OpenAI, llm: LLM) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]},
    ]  # fmt: skip
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once upon"}]
    params = SamplingParams(max_new_tokens=6, temperature=1.2, seed=4, n=3)
    expected = llm.chat(plain, params, progress=False)
    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, temperature=1.2, seed=4, n=3
    )
    assert [c.message.content for c in answer.choices] == [c.text for c in expected]


def test_without_a_limit_a_chat_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HI, logit_bias={"0": 100})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate("def main", SamplingParams(max_new_tokens=8), progress=False)[0].text
    whole = client.completions.create(model=NAME, prompt="def main", max_tokens=8, temperature=0)
    assert whole.choices[0].text == expected
    chunks = client.completions.create(
        model=NAME, prompt="def main", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_decoders_pooled_states(
    client: openai.OpenAI, llm: LLM, pooling: str
) -> None:
    texts = ["Once upon a time", "def main"]
    found = client.embeddings.create(model=NAME, input=texts, extra_body={"pooling": pooling})
    for text, item in zip(texts, found.data, strict=True):
        ids = torch.tensor([llm.engine.tokenizer.encode(text)])
        positions = torch.arange(ids.shape[1])[None]
        with torch.inference_mode():
            states = llm.engine.decoder(ids, positions, CausalAttention())[0]
        pooled = states.mean(0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(
            torch.tensor(item.embedding), pooled / pooled.norm(), rtol=1e-4, atol=1e-5
        )
    assert found.usage.prompt_tokens == sum(len(llm.engine.tokenizer.encode(t)) for t in texts)


def test_embeddings_as_base64_and_unscaled(server: RealServer) -> None:
    plain = server.ask("/v1/embeddings", input="Once", normalize=False).json()["data"][0]
    coded = server.ask(
        "/v1/embeddings", input="Once", normalize=False, encoding_format="base64"
    ).json()["data"][0]["embedding"]
    raw = base64.b64decode(coded)
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(plain["embedding"])
    assert sum(x * x for x in plain["embedding"]) != pytest.approx(1)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="frog " * 5000)
    assert long.value.code == "context_length_exceeded"
    assert str(CONTEXT) in long.value.message
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=NAME, prompt="x", extra_body={"colour": "red"})
    assert unknown.value.param == "colour"


def test_metrics_count_what_was_asked(server: RealServer) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
             "e2e_request_latency_seconds_count", "inter_token_latency_seconds_count",
             "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
             "request_decode_time_seconds_count"]  # fmt: skip
    before = [server.metric(name) for name in names]
    server.ask(prompt=[5, 6, 7], max_tokens=4, n=2, ignore_eos=True)
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 8, 2, 2, 6, 2, 2, 2]
    parts = ("queue", "prefill", "decode")
    spent = sum(server.metric(f"request_{part}_time_seconds_sum") for part in parts)
    assert 0 < spent < server.metric("e2e_request_latency_seconds_sum")
    assert server.metric("kv_cache_usage_perc", engine="0") == 0
    assert server.metric("engine_steps_total", engine="0") > 0


def test_tokenize_and_back(server: RealServer, llm: LLM) -> None:
    text = "Once upon a time 你好"
    found = server.ask("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == llm.engine.tokenizer.encode(text)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.ask("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    chat = server.ask("/tokenize", messages=HI).json()["tokens"]
    rendered = llm.engine.tokenizer.chat.render(HI)
    assert chat == llm.engine.tokenizer.encode(rendered, add_special=False)
