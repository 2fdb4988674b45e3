"""Whatever is sent: no 500, no hang, and an error is always in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.server.chat_protocol import ChatRequest
from fivefold.engines.serve.server.protocol import CompletionRequest
from tests.unit.serve.server.real_server import NAME, RealServer, error_of

SECONDS = 60
SENT_OFTEN = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"]
BODIES = {
    "/v1/completions": (CompletionRequest, {"model": NAME, "prompt": "x", "max_tokens": 3}),
    "/v1/chat/completions": (
        ChatRequest,
        {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    ),
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([NAME, "auto", "none", "text", 0, 1, 2, -1, [], {}, [[]], [1], ["a"]]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


def check(answer: httpx.Response) -> None:
    """A success, or an error that says what is wrong and blames the request."""
    if answer.status_code == 200:
        return
    assert 400 <= answer.status_code < 500, answer.text
    error_of(answer, answer.status_code)


@pytest.mark.parametrize("path", list(BODIES))
def test_any_value_in_any_field(server: RealServer, path: str) -> None:
    model, sound = BODIES[path]
    fields = st.sampled_from(sorted(model.model_fields))

    @settings(
        max_examples=60, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    def run(changes: dict[str, Any]) -> None:
        body = {**sound, **changes}
        if isinstance(body.get("max_tokens"), int):
            body["max_tokens"] = min(body["max_tokens"], 5)
        check(server.http.post(path, json=body, timeout=SECONDS))

    run()
    server.wait_idle()


@settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    path=st.sampled_from([*SENT_OFTEN, "/detokenize"]),
    body=st.binary(max_size=40) | VALUES.map(lambda v: str(v).encode("utf-8", "replace")),
    kind=st.sampled_from(["application/json", "text/plain", "application/json; charset=x", ""]),
)
def test_any_bytes(server: RealServer, path: str, body: bytes, kind: str) -> None:
    check(server.http.post(path, content=body, headers={"Content-Type": kind}, timeout=SECONDS))


@pytest.mark.slow
def test_schemathesis(tiny: Path) -> None:
    """Bodies made from the server's own OpenAPI description, right ones and wrong ones."""
    fuzzed = RealServer(tiny, "--request-seconds", "20", "--max-context", "64")
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    for operation in schema.get_all_operations():
        _fuzz(operation.ok())
    fuzzed.wait_idle()
    assert fuzzed.stop()[0] == 0


def _fuzz(operation: Any) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        answer = case.call(timeout=SECONDS)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run()
