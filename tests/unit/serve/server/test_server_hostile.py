"""Bytes that are no HTTP, bodies made to be slow, and sound fields in any combination."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.server.body_limits import check_depth
from fivefold.text.tokenizer import Tokenizer
from tests.unit.serve.server.real_server import NAME, RealServer, error_of

JSON = {"Content-Type": "application/json"}
ALL_UNLIKELY = {str(token): -100 for token in range(400)}
FIELDS: dict[str, list[Any]] = {
    "prompt": [
        "x",
        "",
        "\x00\ufffd😀",
        [5],
        [5, 399],
        [[5, 6], [7]],
        ["a", "a", "bc"],
        "word " * 99,
    ],
    "max_tokens": [7, 2, 1, 7, 0],
    "temperature": [0, 0.7, 2, 1e-30, 1e30],
    "top_p": [1, 0.5, 1e-9],
    "top_k": [-1, 0, 1, 5, 10**9],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [1e-30, 0.5, 2, 1e30],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{}, {"5": 100, "6": -100}, ALL_UNLIKELY],
    "seed": [0, 2**63 - 1, -(2**63)],
    "stop": ["e", ["é", "\n", "a" * 9999], []],
    "n": [1, 3],
    "best_of": [1, 3],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "echo": [True, False],
    "logprobs": [0, 5],
    "prompt_logprobs": [0, 2],
    "min_tokens": [0, 2],
    "stop_token_ids": [[], [5, 6, 7]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [True, False],
    "priority": [-100, 100],
    "cache_salt": ["", "s", "\x00"],
}
VALUES = {name: st.sampled_from(values) for name, values in FIELDS.items()}
NEEDED = {"prompt": VALUES.pop("prompt"), "max_tokens": VALUES.pop("max_tokens")}
COMBINATIONS = st.lists(st.sampled_from(sorted(VALUES)), max_size=7, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({**NEEDED, **{name: VALUES[name] for name in names}})
)


def strictly(text: str) -> Any:
    """JSON as RFC 8259 has it, without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {text}")

    return json.loads(text, parse_constant=refuse)


def check_combination(server: RealServer, body: dict[str, Any]) -> None:
    answer = server.ask(**body)
    if answer.status_code != 200:
        error_of(answer, 400)
        return
    prompts = len(body["prompt"]) if body["prompt"] and isinstance(body["prompt"][0], list) else 1
    prompts = 3 if body["prompt"] == FIELDS["prompt"][6] else prompts
    wanted = {*range(prompts * body.get("n", 1))}
    if not body.get("stream"):
        choices = strictly(answer.text)["choices"]
        assert {choice["index"] for choice in choices} == wanted
        return
    *lines, last = [line for line in answer.text.split("\n") if line]
    events = [strictly(line.removeprefix("data: ")) for line in lines]
    assert last == "data: [DONE]"
    ended = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(ended) == sorted(wanted)


@settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(COMBINATIONS)
def test_sound_fields_in_any_combination(server: RealServer, body: dict[str, Any]) -> None:
    check_combination(server, body)


@pytest.mark.slow
@settings(
    max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(COMBINATIONS)
def test_sound_fields_in_many_combinations(server: RealServer, body: dict[str, Any]) -> None:
    check_combination(server, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_ends_inside_a_character(
    server: RealServer, tiny: Path, stream: bool
) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    ids = tokenizer.encode("好😀ž", add_special=False)
    assert len(ids) > 3  # characters are cut in pieces
    for end in range(1, len(ids) + 1):
        for echo in (False, True):
            check_combination(
                server,
                {"prompt": ids[:end], "max_tokens": 5, "echo": echo, "stream": stream, "top_k": 3},
            )


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model": "tiny", "prompt": "x"}',
        json.dumps({"model": NAME, "prompt": "x"}).encode("utf-16"),
        b'{"model": "tiny", "prompt": "x", "prompt": 5}',
        b'{"model": "tiny", "prompt": "\xe5\xa5"}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": 1e400}',
        b'{"model": "tiny", "prompt": "x", "temperature": -NaN}',
        b'{"model": "tiny", "prompt": "x"} more',
        b'{"model": "tiny", "prompt": ' + b'"' * 1001 + b"}",
        b"\x1f\x8b\x08\x00 not what it says",
        b"9" * 100_000,
    ],
)
def test_bodies_that_are_no_json(server: RealServer, body: bytes) -> None:
    answer = server.http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code != 200:
        error_of(answer, 400)


def test_depth_is_found_in_one_pass() -> None:
    """Strings that are not closed must not be read again from each quote in them."""
    for body in (b'\\"' * 200_000, b'"' * 200_000, b'"\\' * 200_000, b'\\"' * 200_000 + b"\\"):
        start = time.process_time()
        check_depth(b"[]" * 65 + body)
        assert time.process_time() - start < 5


def test_a_body_of_many_quotes(server: RealServer) -> None:
    body = b'{"model": "tiny", "prompt": "x", "a": ' + b"[]" * 65 + b'\\"' * 3_000_000
    error_of(server.http.post("/v1/completions", content=body, headers=JSON), 400)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RAW = [
    b"\x00" * 100,
    b"\r\n" * 10,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
    b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /..%2f..%2fapp.py HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nX-Request-Id: \xff\r\n\r\n",
    b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    POST + b"Content-Length: 100\r\n\r\n{",
    POST + b"Content-Length: -1\r\n\r\n{}",
    POST + b"Content-Length: many\r\n\r\n{}",
    POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.fixture(scope="module")
def battered(tiny: Path) -> Iterator[RealServer]:
    """A server of its own: what is no HTTP leaves a warning in its log."""
    running = RealServer(tiny)
    yield running
    status, _, errors = running.stop()
    assert status == 0
    assert "Traceback" not in errors


def talk(server: RealServer, data: bytes) -> bytes:
    """What a connection gives back until it is closed."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError:  # closed before it had read all
            return b""


def test_bytes_that_are_no_request(battered: RealServer) -> None:
    for data in RAW:
        reply = talk(battered, data)
        status = int(reply.split(b" ", 2)[1]) if reply else 400
        assert status < 500, (data[:80], reply)
        assert b"root:" not in reply and b"import" not in reply
    assert battered.ask(prompt="x", max_tokens=1).status_code == 200
    assert battered.wait_idle()["restarts"] == 0


def test_requests_that_stop_coming_hold_nothing_up(battered: RealServer) -> None:
    where = urlsplit(battered.url)
    address = (where.hostname, where.port)
    held = [socket.create_connection(address, timeout=30) for _ in range(50)]
    for place, connection in enumerate(held):
        connection.sendall((POST + b"Content-Length: 100\r\n\r\n{")[: 10 + 3 * place])
    assert battered.ask(prompt="x", max_tokens=1).status_code == 200
    for connection in held:
        connection.close()
    battered.wait_idle()
    assert httpx.get(f"{battered.url}/ready").status_code == 200
