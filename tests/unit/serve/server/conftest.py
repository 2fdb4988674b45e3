"""One tiny model and one server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serve.server.real_server import RealServer, tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[RealServer]:
    running = RealServer(tiny, "--deterministic", "--served-name", "other")
    yield running
    status, _, errors = running.stop()
    assert (status, errors) == (0, "")
