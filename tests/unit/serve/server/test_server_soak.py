"""Thousands of short requests, many of them abandoned or wrong, through a cache that is too small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.unit.serve.server.real_server import NAME, RealServer

WRONG: list[dict[str, Any]] = [
    {"temperature": -1}, {"prompt": [999]}, {"colour": 1}, {"max_tokens": 5000}, {"n": 0},
]  # fmt: skip
ALL_AT_ONCE = 48


def requests(count: int) -> list[dict[str, Any]]:
    """Sound ones: few kinds, so that each can be asked alone as well."""
    numbers = random.Random(0)
    starts = ["Once upon a time ", "There was a frog in a pond. " * 4, "def main", "你好"]
    return [
        {
            "model": NAME,
            "prompt": numbers.choice(starts) + str(kind),
            "max_tokens": numbers.randrange(1, 60),
            "temperature": numbers.choice([0, 1.0]),
            "seed": kind,
            "ignore_eos": True,
        }
        for kind in range(count)
    ]


async def hammer(server: RealServer, count: int, expected: list[str]) -> int:
    """Run them all; how many survived, each equal to its answer alone."""
    numbers = random.Random(1)
    kinds = requests(len(expected))
    gate = asyncio.Semaphore(ALL_AT_ONCE)
    survived = 0

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal survived
        kind, fate = numbers.randrange(len(kinds)), numbers.random()
        body, patience = kinds[kind], None
        if fate < 0.15:
            body = {**body, **numbers.choice(WRONG)}
        elif fate < 0.4:
            patience = numbers.random() * 0.2
        async with gate:
            try:
                async with (
                    asyncio.timeout(patience),
                    session.post("/v1/completions", json=body) as a,
                ):
                    answer = await a.json()
                    status = a.status
            except TimeoutError:
                return
        if fate < 0.15:
            assert status == 400, answer
        else:
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected[kind]
            survived += 1

    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(300)) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    return survived


def memory(server: RealServer) -> list[int]:
    """Bytes that the server and its engine hold."""
    processes = [psutil.Process(server.process.pid), *server.engine_processes()]
    return [process.memory_info().rss for process in processes]


@pytest.fixture
def cramped(tiny: Path) -> Iterator[RealServer]:
    running = RealServer(
        tiny, "--deterministic", "--kv-memory", "200K", "--max-context", "256",
        "--token-budget", "64", "--max-sequences", "32",
    )  # fmt: skip
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests(cramped: RealServer) -> None:
    expected = [
        cramped.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        for body in requests(40)
    ]
    asyncio.run(hammer(cramped, 2000, expected))
    before, first = memory(cramped), cramped.wait_idle()
    survived = asyncio.run(hammer(cramped, 10_000, expected))
    after, last = memory(cramped), cramped.wait_idle()
    assert survived > 5000
    assert last["preemptions"] > first["preemptions"] > 0
    assert last["restarts"] == 0
    for then, now in zip(before, after, strict=True):
        assert now < then + (16 << 20), (before, after)
    assert cramped.stop()[0] == 0
