"""One set of workers per world size for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dist.harness import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    started: dict[int, Workers] = {}

    def get(world_size: int) -> Workers:
        if world_size not in started:
            started[world_size] = Workers(world_size)
        return started[world_size]

    yield get
    for each in started.values():
        each.stop()
