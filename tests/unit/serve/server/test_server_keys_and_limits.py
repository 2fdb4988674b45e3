"""Who may ask, how much and how long: a server with keys and narrow limits."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from fivefold.core.errors import ConfigError
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.keys import Keys, new_key
from fivefold.engines.serve.server.rate_limit import Allowance
from tests.unit.serve.server.real_server import NAME, RealServer, error_of

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True}
KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def narrow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    entries = []
    limits: dict[str, dict[str, Any]] = {
        "alice": {"tenant": "a"}, "albert": {"tenant": "a"}, "bob": {},
        "few": {"requests_per_minute": 2}, "short": {"tokens_per_minute": 20},
    }  # fmt: skip
    for name, more in limits.items():
        KEYS[name], digest = new_key()
        entries.append({"name": name, "sha256": digest, **more})
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}))
    running = RealServer(
        tiny, "--api-keys", str(path), "--max-sequences", "1", "--queue-limit", "1",
        "--max-body", "64K", "--request-seconds", "1.5",
    )  # fmt: skip
    yield running
    status, _, errors = running.stop()
    assert (status, errors) == (0, "")


def ask(server: RealServer, key: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS.get(key, key)}"}
    body = {"model": NAME, "prompt": "x", "max_tokens": 1, **body}
    return server.http.post("/v1/completions", json=body, headers=headers)


def test_without_the_right_key(narrow: RealServer) -> None:
    assert error_of(narrow.ask(prompt="x"), 401)["code"] == "no_api_key"
    for key in ("ff-wrong", "é", KEYS["bob"][:-1], KEYS["bob"].upper()):
        headers = {"Authorization": f"Bearer {key}".encode()}
        body = {"model": NAME, "prompt": "x"}
        answer = narrow.http.post("/v1/completions", json=body, headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert error_of(narrow.http.get("/v1/models"), 401)
    assert error_of(narrow.ask("/tokenize", prompt="x"), 401)
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="ff-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_what_needs_no_key(narrow: RealServer) -> None:
    for path in ("/health", "/ready", "/metrics", "/engine"):
        assert narrow.http.get(path).status_code == 200


def test_a_key_lets_in(narrow: RealServer) -> None:
    assert ask(narrow, "bob").status_code == 200
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key=KEYS["bob"])
    assert client.models.list().data[0].id == NAME


def test_prefixes_are_shared_within_a_tenant_alone(narrow: RealServer) -> None:
    prompt = "There was a frog in a pond. " * 10
    cached = [
        ask(narrow, name, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name in ("alice", "bob", "albert")
    ]
    assert cached[0] == cached[1] == 0 < cached[2]


def test_requests_per_minute(narrow: RealServer) -> None:
    assert [ask(narrow, "few").status_code for _ in range(2)] == [200, 200]
    answer = ask(narrow, "few")
    error = error_of(answer, 429)
    assert error["code"] == "rate_limit_exceeded"
    assert "its 2 requests per minute" in error["message"]
    assert 25 <= int(answer.headers["retry-after"]) <= 30


def test_tokens_per_minute_count_what_was_written(narrow: RealServer) -> None:
    assert ask(narrow, "short", max_tokens=40, ignore_eos=True).status_code == 200
    answer = ask(narrow, "short")
    assert "its 20 tokens per minute" in error_of(answer, 429)["message"]
    assert int(answer.headers["retry-after"]) > 60


def test_too_large_a_body(narrow: RealServer) -> None:
    assert "65536 bytes" in error_of(ask(narrow, "bob", prompt="x" * 70_000), 413)["message"]


def test_a_body_that_does_not_come(narrow: RealServer) -> None:
    url = httpx.URL(narrow.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        # In as many pieces as it likes, until the server hangs up.
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert "within 1.5 s" in answer


def test_a_request_that_takes_too_long(narrow: RealServer) -> None:
    assert error_of(ask(narrow, "bob", **LONG), 504)["code"] == "request_timeout"
    narrow.wait_idle()
    headers = {"Authorization": f"Bearer {KEYS['bob']}"}
    body = {"model": NAME, "stream": True, **LONG}
    with narrow.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        last = [line for line in answer.iter_lines() if line][-1]
    assert "took longer than 1.5 s" in last
    narrow.wait_idle()


def test_a_full_queue(narrow: RealServer) -> None:
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(ask, narrow, "bob", **LONG)
        narrow.wait(lambda state: state["running"] == 1)
        waiting = threads.submit(ask, narrow, "bob", **LONG)
        narrow.wait(lambda state: state["waiting"] == 1)
        answer = ask(narrow, "bob")
        assert error_of(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert {running.result().status_code, waiting.result().status_code} == {504}
    narrow.wait_idle()
    assert ask(narrow, "bob").status_code == 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys: [", "cannot read"),
        ("keys: []", "keys"),
        ("a: 1", "keys"),
        ("keys: [{name: a, sha256: abc}]", "keys.0.sha256"),
        ("keys: [{name: a, sha256: " + "a" * 64 + ", limit: 5}]", "keys.0.limit"),
        ("keys: [{name: a, sha256: " + "a" * 64 + "}, {name: a, sha256: " + "b" * 64 + "}]",
         "two keys are named 'a'"),
    ],
)  # fmt: skip
def test_files_of_keys_that_are_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        Keys.from_file(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Keys.from_file(tmp_path / "none.yaml")


def test_a_key_made_on_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fivefold", "serve-key", "carol", "--tokens-per-minute", "5"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + made.stdout)
    key = made.stderr.split()[-1]
    caller = Keys.from_file(path).caller(f"Bearer {key}")
    assert (caller.name, caller.tenant) == ("carol", "carol")
    assert key not in made.stdout
    caller.charge(6)
    with pytest.raises(APIError, match="5 tokens per minute"):
        caller.admit()


def test_an_allowance_fills_up_again() -> None:
    now = [0.0]
    allowance = Allowance(60, clock=lambda: now[0])
    assert allowance.wait() == 0
    allowance.take(100)
    assert allowance.wait() == pytest.approx(41)
    now[0] = 41.0
    assert allowance.wait() == 0
    allowance.take(1)
    now[0] = 1000.0
    allowance.take(60)
    assert allowance.wait() == pytest.approx(1)  # it holds a minute's worth, not more
