"""Clients that leave, an engine that dies, and the server's own end."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.serve.server.real_server import NAME, RealServer, error_of

LONG: dict[str, Any] = {
    "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def mortal(tiny: Path) -> Iterator[RealServer]:
    """A server that does not outlive this module."""
    running = RealServer(tiny, "--drain-seconds", "60")
    yield running
    running.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def hasty(tiny: Path) -> Iterator[RealServer]:
    """A server that waits neither for its engine nor for requests; it ends with this module too."""
    running = RealServer(tiny, "--engine-seconds", "2", "--drain-seconds", "0.2")
    yield running
    running.stop(signal.SIGKILL)


def first_events(answer: httpx.Response, count: int) -> Iterator[str]:
    """The lines of a stream, once `count` of them are there."""
    lines = (line for line in answer.iter_lines() if line)
    for _ in range(count):
        assert next(lines).startswith("data: {")
    return lines


def stream(server: RealServer, **body: Any) -> Any:
    return server.http.stream(
        "POST", "/v1/completions", json={"model": NAME, "stream": True, **body}
    )


def test_a_client_that_leaves_frees_its_blocks(server: RealServer) -> None:
    before = server.engine()["steps"]
    with stream(server, **LONG, n=2) as answer:
        lines = first_events(answer, 3)  # held: what is not, is closed
        assert server.engine()["blocks_owned"] > 0
        assert next(lines)
    after = server.wait_idle()
    assert after["steps"] - before < LONG["max_tokens"]  # it was not written to its end


def test_a_client_that_does_not_wait_for_a_whole_answer(server: RealServer) -> None:
    before = server.engine()["steps"]
    aborted = server.metric("request_success_total", finished_reason="abort")
    with httpx.Client(base_url=server.url, timeout=0.3) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post("/v1/completions", json={"model": NAME, **LONG})
    after = server.wait_idle()
    assert after["steps"] - before < LONG["max_tokens"]
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1


def test_a_killed_engine_is_said_and_replaced(mortal: RealServer) -> None:
    (child,) = mortal.engine_processes()
    with ThreadPoolExecutor() as threads, stream(mortal, **LONG) as answer:
        lines = first_events(answer, 3)
        whole = threads.submit(mortal.ask, **LONG)
        mortal.wait(lambda state: state["running"] == 2)
        child.send_signal(signal.SIGKILL)
        rest = list(lines)
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert "was killed by signal 9 (SIGKILL)" in error["message"]
        assert "this request is lost" in error["message"]
        assert error["code"] == "engine_down"
        told = whole.result()
    assert error_of(told, 503)["message"] == error["message"]
    assert int(told.headers["retry-after"]) >= 1
    for path in ("/ready", "/health"):
        assert "is being restarted" in error_of(mortal.http.get(path), 503)["message"]
    assert error_of(mortal.ask(prompt="x"), 503)["code"] == "engine_down"
    mortal.wait(lambda state: state["ready"])
    assert mortal.ask(prompt="Once", max_tokens=3).status_code == 200
    assert mortal.engine_processes() != [child]
    assert mortal.metric("engine_restarts_total", engine="0") == 1
    assert mortal.metric("request_success_total", finished_reason="error") == 2


def test_an_engine_that_hangs_is_replaced(hasty: RealServer) -> None:
    (child,) = hasty.engine_processes()
    with stream(hasty, **LONG) as answer:
        lines = first_events(answer, 3)
        child.suspend()
        rest = list(lines)
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "said nothing for" in error["message"]
    assert "while requests waited; it is being restarted" in error["message"]
    assert hasty.wait(lambda state: state["ready"])
    assert hasty.engine_processes() != [child]


def test_sigterm_lets_requests_end_and_takes_no_more(mortal: RealServer) -> None:
    with stream(mortal, **LONG) as answer:
        lines = first_events(answer, 1)
        children = mortal.engine_processes()
        mortal.process.send_signal(signal.SIGTERM)
        refused = error_of(_once_draining(mortal), 503)
        assert refused["code"] == "draining"
        assert error_of(mortal.http.get("/ready"), 503)["code"] == "draining"
        assert mortal.http.get("/health").status_code == 200
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 1000
    status, out, errors = mortal.stop()
    assert status == 0
    assert "requests may end within 60 s" in out
    assert out.endswith("fivefold: stopped\n")
    assert "Traceback" not in errors
    assert not any(child.is_running() for child in children)


def _once_draining(server: RealServer) -> httpx.Response:
    """The first answer that is a refusal: the signal takes a moment."""
    for _ in range(200):
        answer = server.ask(prompt="x", max_tokens=1)
        if answer.status_code != 200:
            return answer
        time.sleep(0.01)
    raise AssertionError("the server takes requests after SIGTERM")


def test_the_time_to_drain_ends_and_ctrl_c_too(hasty: RealServer) -> None:
    with stream(hasty, **LONG) as answer:
        lines = first_events(answer, 1)
        stopping = threading.Timer(0.0, hasty.process.send_signal, (signal.SIGINT,))
        stopping.start()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    status, out, _ = hasty.stop()
    assert status == 0
    assert "stopped with 1 requests cut off" in out
