"""/v1/completions over HTTP: the same answers as in this process, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold import LLM, SamplingParams
from tests.unit.serve.server.real_server import NAME, RealServer, open_tiny

GREEDY = {"temperature": 0, "max_tokens": 12}
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    decoder, tokenizer = open_tiny(tiny)
    return LLM(decoder, tokenizer, num_blocks=200, max_sequences=8, token_budget=64)


def events(server: RealServer, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    with server.http.stream("POST", path, json={"model": NAME, "stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_texts_ids_and_lists_of_both(server: RealServer, llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("Once upon")
    expected = llm.generate(["Once upon", "def main"], PARAMS, progress=False)
    one = server.ask(prompt="Once upon", **GREEDY).json()
    assert one["object"] == "text_completion"
    assert one["choices"][0]["text"] == expected[0].text
    assert one["usage"]["prompt_tokens"] == len(ids)
    assert one["usage"]["completion_tokens"] == len(expected[0].token_ids)
    for prompt in (ids, [ids], ["Once upon"]):
        again = server.ask(prompt=prompt, **GREEDY).json()
        assert again["choices"][0]["text"] == expected[0].text
    both = server.ask(prompt=["Once upon", "def main"], **GREEDY).json()["choices"]
    assert [c["text"] for c in both] == [c.text for c in expected]
    assert [c["index"] for c in both] == [0, 1]


def test_a_stream_adds_up(server: RealServer, llm: LLM) -> None:
    expected = llm.generate("Once upon", PARAMS, progress=False)[0]
    found = events(server, prompt="Once upon", stream_options={"include_usage": True}, **GREEDY)
    assert "".join(e["choices"][0]["text"] for e in found[:-1]) == expected.text
    assert [e["usage"] for e in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == len(expected.token_ids)
    assert found[-2]["choices"][0]["finish_reason"] == expected.finish_reason
    assert len({e["id"] for e in found}) == 1


def test_several_answers_streamed_at_once(server: RealServer) -> None:
    asked: dict[str, Any] = {
        "prompt": ["Once", "def"], "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 9,
    }  # fmt: skip
    whole = [choice["text"] for choice in server.ask(**asked).json()["choices"]]
    assert len(whole) == 6
    texts = [""] * 6
    for event in events(server, **asked):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == whole


def test_stop_strings_penalties_and_bias(server: RealServer, llm: LLM) -> None:
    text = llm.generate("Once upon", PARAMS, progress=False)[0].text
    stop = text[3:6]
    choice = server.ask(prompt="Once upon", stop=stop, **GREEDY).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    forced = server.ask(prompt="Once upon", logit_bias={"70": 100}, **GREEDY).json()
    assert forced["choices"][0]["text"] == llm.engine.tokenizer.decode([70]) * 12
    more = {
        "top_k": 9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "seed": 3,
    }
    params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, **more)
    expected = llm.generate("Once upon", params, progress=False)[0].text
    found = server.ask(prompt="Once upon", max_tokens=12, ignore_eos=True, **more).json()
    assert found["choices"][0]["text"] == expected


def test_log_probabilities_with_the_prompt(server: RealServer, llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=4, logprobs=2, prompt_logprobs=2)
    expected = llm.generate("Once upon a", params, progress=False)[0]
    asked = {"prompt": "Once upon a", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = server.ask(echo=True, **asked).json()["choices"][0]
    assert found["text"] == "Once upon a" + expected.text
    assert found["logprobs"]["token_logprobs"][0] is None
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    ids = [*llm.engine.tokenizer.encode("Once upon a"), *expected.token_ids]
    steps = [*expected.prompt_logprobs, *expected.logprobs]
    own = [step[token].logprob for token, step in zip(ids[1:], steps[1:], strict=True)]
    assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    assert [len(top) for top in found["logprobs"]["top_logprobs"][1:]] >= [2] * len(own)
    for name, offset in zip(
        found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True
    ):
        assert name.startswith("bytes:") or found["text"][offset:].startswith(name)
    streamed = events(server, **asked)
    rates = [rate for e in streamed for rate in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert rates == found["logprobs"]["token_logprobs"][-4:]
    reading = server.ask(prompt="Once upon a", max_tokens=0, echo=True, logprobs=1).json()
    assert reading["choices"][0]["text"] == "Once upon a"
    assert reading["usage"]["completion_tokens"] == 0
    assert reading["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        own[:-4], abs=1e-4
    )


def test_prompt_logprobs_as_vllm_writes_them(server: RealServer) -> None:
    found = server.ask(prompt="Once upon", prompt_logprobs=1, **GREEDY).json()["choices"][0]
    first, *rest = found["prompt_logprobs"]
    assert first is None
    for step in rest:
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in step.values())
        assert 1 in {entry["rank"] for entry in step.values()}


def test_best_of(server: RealServer, llm: LLM) -> None:
    same = {"temperature": 1.5, "seed": 1, "n": 2, "best_of": 5}
    expected = llm.generate("Once", SamplingParams(max_new_tokens=6, **same), progress=False)
    found = server.ask(prompt="Once", max_tokens=6, **same).json()
    assert [c["text"] for c in found["choices"]] == [c.text for c in expected]
    assert [c["index"] for c in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] > sum(len(c.token_ids) for c in expected)


def test_a_prefix_is_read_once(server: RealServer) -> None:
    prompt = "There was a frog in a pond. " * 12
    first = server.ask(prompt=prompt, cache_salt="x", **GREEDY).json()
    second = server.ask(prompt=prompt, cache_salt="x", **GREEDY).json()
    other = server.ask(prompt=prompt, cache_salt="y", **GREEDY).json()
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, other)]
    assert cached[0] == cached[2] == 0 < cached[1]


def test_a_prompt_that_ends_inside_a_character(server: RealServer, llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("Once 鹿")
    assert llm.engine.tokenizer.decode(ids[:-1]).endswith("\ufffd")
    expected = llm.generate([ids[:-1]], PARAMS, progress=False)[0].text
    found = server.ask(prompt=ids[:-1], echo=True, **GREEDY).json()["choices"][0]["text"]
    assert found.endswith(expected)
    streamed = events(server, prompt=ids[:-1], **GREEDY)
    assert "".join(e["choices"][0]["text"] for e in streamed) == expected


def test_an_empty_prompt_begins_with_nothing(server: RealServer) -> None:
    found = server.ask(prompt="", ignore_eos=True, **GREEDY).json()
    assert found["usage"]["prompt_tokens"] == 1
    assert found["usage"]["completion_tokens"] == 12
