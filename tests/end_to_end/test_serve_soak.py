"""Thousands of requests, many of them bad, on a cache that holds too few: nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import psutil
import pytest

from tests.end_to_end.soak import Soak, asks
from tests.unit.serve.server.real_server import RealServer, tiny_model

MIB = 2**20
AT_ONCE = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Seven blocks for eight answers at once, whose longest alone takes six."""
    model = tiny_model(tmp_path_factory.mktemp("soak") / "tiny")
    running = RealServer(
        model, "--deterministic", "--kv-memory", "128K", "--max-context", "200",
        "--max-sequences", "8", "--token-budget", "48", "--queue-limit", "14",
    )  # fmt: skip
    yield running
    status, _, errors = running.stop()
    assert (status, errors) == (0, "")


@pytest.fixture(scope="module")
def expected(server: RealServer) -> dict[str, list[str]]:
    """What each request gets when it is alone."""
    found = {}
    for ask in asks():
        answer = server.http.post("/v1/completions", json=ask)
        assert answer.status_code == 200, answer.text
        found[json.dumps(ask)] = [choice["text"] for choice in answer.json()["choices"]]
    return found


def held(server: RealServer) -> tuple[int, int]:
    """Bytes and open files of the server and its engine."""
    processes = [psutil.Process(server.process.pid), *server.engine_processes()]
    return (
        sum(each.memory_info().rss for each in processes),
        sum(each.num_fds() for each in processes),
    )


def soak(server: RealServer, expected: dict[str, list[str]], requests: int) -> None:
    run = Soak(server.url, expected)
    asyncio.run(run.run(requests // 2, AT_ONCE))  # what is allocated once is now there
    server.wait_idle()
    before, preempted = held(server), server.engine()["preemptions"]
    asyncio.run(run.run(requests // 2, AT_ONCE))
    after = server.wait_idle()
    assert run.wrong == []
    assert run.seen["answered"] > requests / 3 and run.seen["left a stream"] and run.seen["gave up"]
    assert after["restarts"] == 0
    assert after["preemptions"] - preempted > requests / 40
    memory, files = held(server)
    assert memory - before[0] < 6 * MIB
    assert files <= before[1] + 2
    again = server.http.post("/v1/completions", json=asks()[0]).json()["choices"][0]["text"]
    assert [again] == expected[json.dumps(asks()[0])]


def test_hundreds(server: RealServer, expected: dict[str, list[str]]) -> None:
    soak(server, expected, 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand(server: RealServer, expected: dict[str, list[str]]) -> None:
    soak(server, expected, 10_000)
