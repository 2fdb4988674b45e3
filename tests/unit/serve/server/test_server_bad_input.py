"""What cannot be: one line in OpenAI's shape, with the right status and the field at fault."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.serve.server.real_server import CONTEXT, NAME, RealServer, error_of

HI = [{"role": "user", "content": "Hi"}]
COMPLETIONS = [
    ({"prompt": "x", "model": "tiny2"}, 404, "model", "did you mean 'tiny'"),
    ({"prompt": "x", "max_token": 5}, 400, "max_token", "did you mean 'max_tokens'"),
    ({}, 400, "prompt", "missing required parameter: prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt", "must be a string, a list of token ids"),
    ({"prompt": []}, 400, "prompt", ""),
    ({"prompt": [1, "a"]}, 400, "prompt", "must be a string"),
    ({"prompt": [1, 400]}, 400, "prompt", "token 400, but the vocabulary has 400"),
    ({"prompt": [-1]}, 400, "prompt", "token -1"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature", "greater than or equal to 0, not -1"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "valid number, not 'hot'"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
    ({"prompt": "x", "top_p": 1.5}, 400, "top_p", "less than or equal to 1"),
    ({"prompt": "x", "top_k": -2}, 400, "top_k", ""),
    ({"prompt": "x", "n": 0}, 400, "n", ""),
    ({"prompt": "x", "n": True}, 400, "n", "integer"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "echo=true"),
    ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens", "integer"),
    ({"prompt": "x", "min_tokens": 20}, 400, "min_tokens", "more than max_tokens=16"),
    ({"prompt": "x", "logprobs": 65}, 400, "logprobs", ""),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "keys must be token ids"),
    ({"prompt": "x", "logit_bias": {"400": 1}}, 400, None, "400"),
    ({"prompt": "x", "logit_bias": {"4": 101}}, 400, None, "between -100"),
    ({"prompt": "x", "stop": ""}, 400, None, "empty stop string"),
    ({"prompt": "x", "stop": [1]}, 400, "stop", "a string or a list"),
    ({"prompt": "x", "stop_token_ids": [-1]}, 400, None, ""),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
    ({"prompt": "x", "best_of": 2, "n": 3}, 400, "best_of", "at least n"),
    ({"prompt": "x", "best_of": 2, "stream": True}, 400, "best_of", "stream"),
    ({"prompt": "x", "stream_options": {}}, 400, "stream_options", "stream=true"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, 400, "echo", ""),
    ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", ""),
    ({"prompt": "x", "priority": 1000}, 400, "priority", ""),
    ({"prompt": [5] * CONTEXT}, 400, "prompt", f"{CONTEXT} tokens, but prompt needs {CONTEXT + 1}"),
    ({"prompt": "x " * 40_000}, 400, "prompt", f"context is {CONTEXT}"),
    ({"prompt": [5], "max_tokens": CONTEXT}, 400, "prompt", f"1 in prompt and {CONTEXT} to"),
]  # fmt: skip
CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", ""),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "no content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content", "no images"),
    ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "messages[0].mood", "unknown"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format", "use text, json"),
    ({"messages": HI, "response_format": "json"}, "response_format", "type is None"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "a schema"),
    ({"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {}, "schemas": {}}}}, "response_format", "did you mean 'schema'"),
    ({"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"not": {}}}}}, None, "the schema has not"),
    ({"messages": HI, "structured_outputs": {"regexp": "a"}}, "structured_outputs",
     "did you mean 'regex'"),
    ({"messages": HI, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs",
     "has regex and choice"),
    ({"messages": HI, "structured_outputs": {"regex": "("}}, None, "parenthesis is not closed"),
    ({"messages": HI, "structured_outputs": {"regex": "a"}, "response_format": {
        "type": "json_object"}}, "structured_outputs", "one thing; give one"),
    ({"messages": HI, "structured_outputs": {"regex": "a"}, "ignore_eos": True}, None,
     "ignore_eos goes on past the end"),
    ({"messages": HI, "audio": {"voice": "x"}}, "audio", "text alone"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities", ""),
    ({"messages": HI, "functions": [{}]}, "functions", "use tools"),
    ({"messages": HI, "function_call": "auto"}, "function_call", "use tool_choice"),
    ({"messages": HI, "store": True}, "store", "nothing is stored"),
    ({"messages": HI, "metadata": {"a": "b"}}, "metadata", "nothing is stored"),
    ({"messages": HI, "prediction": {}}, "prediction", "speculative"),
    ({"messages": HI, "service_tier": "flex"}, "service_tier", "one tier"),
    ({"messages": HI, "verbosity": "low"}, "verbosity", ""),
    ({"messages": HI, "web_search_options": {}}, "web_search_options", ""),
    ({"messages": HI, "reasoning_effort": "low"}, "reasoning_effort", "chat template"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"messages": HI, "tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools",
     "--tool-parser"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}],
      "tool_choice": "required"}, "tools", "--tool-parser"),
    ({"messages": HI, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
    ({"messages": HI, "max_tokens": CONTEXT}, "messages", "context"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ""),
    ({"messages": [{"role": "user", "content": "x " * 40_000}]}, "messages", "context"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "{"}}]}]}, "messages", "no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param", "told"), COMPLETIONS)
def test_completions(
    server: RealServer, body: dict[str, Any], status: int, param: str | None, told: str
) -> None:
    error = error_of(server.ask(**body), status)
    assert told in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(("body", "param", "told"), CHATS)
def test_chats(server: RealServer, body: dict[str, Any], param: str | None, told: str) -> None:
    error = error_of(server.ask("/v1/chat/completions", **body), 400)
    assert told in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [5] * CONTEXT}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {}, "input"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_other_endpoints(server: RealServer, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(server.ask(path, **body), 400)["param"] == param


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        (b"{", "application/json", "no JSON"),
        (b"", "application/json", "JSON object"),
        (b"[1]", "application/json", "JSON object"),
        (b'"x"', "application/json", "JSON object"),
        (b"a=1", "application/x-www-form-urlencoded", "JSON object"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', "application/json", ""),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json", ""),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "application/json", "finite"),
        (b'{"model": "tiny", "prompt": "x", "top_p": Infinity}', "application/json", ""),
        (b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "application/json", ""),
        (b'{"prompt": ' + b"[" * 100_000 + b"}", "application/json", "deeper than 64"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "application/json", "deeper than 64"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(
    server: RealServer, content: bytes, kind: str, told: str
) -> None:
    answer = server.http.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert told in error_of(answer, 400)["message"]


def test_a_body_of_ten_megabytes(server: RealServer) -> None:
    body = b'{"model": "tiny", "prompt": "' + b"x" * 10_000_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        error = error_of(client.post("/v1/completions", content=body, headers=headers), 413)
    assert error["code"] == "request_too_large"


def test_paths_and_methods(server: RealServer) -> None:
    assert "nothing at GET /v1/nothing" in error_of(server.http.get("/v1/nothing"), 404)["message"]
    assert error_of(server.http.get("/v1/models/none"), 404)["code"] == "model_not_found"
    wrong = server.http.get("/v1/completions")
    assert "does not take GET" in error_of(wrong, 405)["message"]
    assert wrong.headers["allow"] == "POST"


def test_harmless_values_of_unsupported_fields(server: RealServer) -> None:
    harmless = {
        "store": False, "service_tier": "auto", "modalities": ["text"], "metadata": None,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "none",
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "tools": None,
    }  # fmt: skip
    answer = server.ask("/v1/chat/completions", messages=HI, max_tokens=2, **harmless)
    assert answer.status_code == 200, answer.text


def test_the_server_is_as_it_was(server: RealServer) -> None:
    server.wait_idle()
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.ask(model=NAME, prompt="x", max_tokens=1).status_code == 200
