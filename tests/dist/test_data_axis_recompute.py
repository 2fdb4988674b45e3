"""Activation checkpointing and compilation change what is stored, not what is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fivefold.core.layout import Layout
from tests.dist import cases
from tests.dist.harness import Workers

GetWorkers = Callable[[int], Workers]
STEPS = 3
LAYOUTS = ["", "dp_shard=2,zero=2", "dp_shard=2,zero=3"]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    torch.set_num_threads(1)
    rows: list[Any] = cases.train("", steps=STEPS)["rows"]
    return rows


def compiled(layout: str, backend: str, options: dict[str, Any]) -> list[Any]:
    """Rows of a run with blocks compiled by `backend`."""
    torch.compiler.reset()
    chosen = partialmethod(nn.Module.compile, backend=backend)
    with mock.patch.object(nn.Module, "compile", chosen):
        run = cases.Run(layout, **{"compile": True, **options})
        rows = run.steps(0, STEPS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
    return rows


def assert_same(found: list[Any], wanted: list[Any], tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "full", "recompute_every": 2},
    ],
)
def test_recomputation_does_not_show(
    workers: GetWorkers, alone: list[Any], layout: str, options: dict[str, Any]
) -> None:
    arguments = (layout, cases.CONFIG, STEPS, "fp32", None, None, options)
    found = workers(Layout.parse(layout).world_size).run(cases.train, *arguments)[0]
    assert_same(found["rows"], alone)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        *((layout, "none") for layout in LAYOUTS),
        ("", "full"),
        ("", "selective"),
        ("dp_shard=2,zero=3", "selective"),
    ],
)
def test_compilation_does_not_show(
    workers: GetWorkers, alone: list[Any], layout: str, recompute: str
) -> None:
    """Captured and differentiated by the compiler, run by torch's own operators (quick)."""
    arguments = (layout, "aot_eager", {"recompute": recompute})
    found = workers(Layout.parse(layout).world_size).run(compiled, *arguments)[0]
    assert_same(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generated_code_does_not_show(workers: GetWorkers, alone: list[Any], layout: str) -> None:
    """With Inductor's C++; fused sums round otherwise. Seen: 4e-8."""
    found = workers(Layout.parse(layout).world_size).run(compiled, layout, "inductor", {})[0]
    assert_same(found, alone)
