"""Several engines behind one address: prompts go where their beginning was read."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.engines.serve.server import router
from fivefold.engines.serve.server.router import SLACK, PrefixRouter
from tests.unit.serve.server.real_server import RealServer


def prompts(seed: int, shared: int, count: int) -> list[list[int]]:
    numbers = random.Random(seed)
    start = [numbers.randrange(100) for _ in range(shared)]
    return [start + [numbers.randrange(100) for _ in range(9)] for _ in range(count)]


def test_without_a_shared_beginning_the_least_busy_is_chosen() -> None:
    chooser = PrefixRouter(3, 4)
    assert chooser.choose([1] * 8, "", [2, 1, 3]) == 1
    assert chooser.choose([2] * 8, "", [0, 0, 0]) == 0
    assert chooser.choose([3] * 3, "", [5, 5, 4]) == 2
    assert chooser.choose([4] * 8, "", [None, 7, 9]) == 1


def test_the_longest_shared_beginning_wins_unless_its_replica_is_much_busier() -> None:
    chooser = PrefixRouter(2, 4)
    first, second = prompts(0, 40, 2)
    assert chooser.choose(first, "", [5, 4]) == 1
    assert chooser.choose(second, "", [0, SLACK]) == 1
    assert chooser.choose(second, "", [2, 2 * 2 + SLACK]) == 1
    assert chooser.choose(first, "other tenant", [0, 1]) == 0
    assert chooser.choose(second, "", [0, SLACK + 1]) == 0
    assert chooser.choose(second, "", [SLACK, 0]) == 1  # both know it now: the idler one
    assert chooser.choose(second, "", [3, None]) == 0
    chooser.forget(1)
    assert chooser.choose([*first[:16], 7, 7, 7, 7], "", [1, 0]) == 0


def test_what_was_not_used_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "REMEMBERED", 20)
    chooser = PrefixRouter(2, 4)
    (old,) = prompts(1, 40, 1)
    assert chooser.choose(old, "", [1, 0]) == 1
    assert chooser.choose(old, "", [0, 1]) == 1
    for prompt in prompts(2, 0, 30):
        chooser.choose(prompt, "", [1, 0])
    assert chooser.choose(old, "", [0, 1]) == 0


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[RealServer]:
    running = RealServer(tiny, "--layout", "dp_replicate=2")
    yield running
    assert running.stop()[0] == 0


def test_a_beginning_is_read_by_one_replica(pair: RealServer) -> None:
    def ask(prompt: str) -> dict[str, Any]:
        answer: dict[str, Any] = pair.ask(prompt=prompt, max_tokens=2, temperature=0).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = "There was a frog in a small pond. " * 10
    assert ask(first) == 0
    assert [ask(f"{first}{n}") > 0 for n in range(4)] == [True] * 4
    state = pair.engine()
    assert len(state["engines"]) == 2
    assert sorted(engine["tokens_hit"] > 0 for engine in state["engines"]) == [False, True]


def test_one_dies_and_the_other_serves_on(pair: RealServer) -> None:
    pair.engine_processes()[0].send_signal(signal.SIGKILL)
    pair.wait(lambda state: sorted(e["ready"] for e in state["engines"]) == [False, True])
    assert pair.http.get("/ready").status_code == 200
    for n in range(5):
        assert pair.ask(prompt=f"{n} frogs", max_tokens=2).status_code == 200
    pair.wait(lambda state: all(e["ready"] for e in state["engines"]))
    assert pair.engine()["restarts"] == 1
