"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.harness import Workers

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data kept beside the checkout; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    """One set of gloo workers per world size for the whole session."""
    started: dict[int, Workers] = {}

    def get(world_size: int) -> Workers:
        if world_size not in started:
            started[world_size] = Workers(world_size)
        return started[world_size]

    yield get
    for each in started.values():
        each.stop()
