"""What is set before torch is loaded."""

from __future__ import annotations

import os

import pytest

from fivefold.core.environment import SPINS, bound_spinning


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ({}, SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_how_idle_threads_wait(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], after: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == after
