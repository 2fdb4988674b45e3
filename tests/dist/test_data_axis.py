"""Every data layout gives the numbers that one process gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.core.layout import Layout
from tests.dist import cases, faults
from tests.dist.harness import Workers

GetWorkers = Callable[[int], Workers]
# fp32 sums in another order: relative difference of loss and gradient norm over 20 steps. Seen: 3e-7.
TOLERANCE = 1e-5
# Of a parameter after 20 updates of up to 3e-3 each. Adam divides by the root of a running square,
# so where a gradient is all rounding its relative error shows whole. Seen: 3e-6.
MASTER_TOLERANCE = 2e-5
MOMENT_TOLERANCE = 5e-5  # relative to the largest of the tensor; seen: 6e-6
LAYOUTS = [
    "offload=optimizer",
    "offload=parameters",
    "dp_replicate=2",
    "dp_replicate=2,offload=optimizer",
    "dp_replicate=2,offload=parameters",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=1,offload=optimizer",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=2,offload=optimizer",
    "dp_shard=2,zero=3",
    "dp_shard=2,zero=3,offload=optimizer",
    "dp_shard=2,zero=3,offload=parameters",
    "dp_replicate=4",
    "dp_shard=4,zero=1",
    "dp_shard=4,zero=2",
    "dp_shard=4,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2,zero=3",
    pytest.param("dp_replicate=2,dp_shard=2,zero=2,offload=optimizer", marks=pytest.mark.slow),
    pytest.param("dp_replicate=2,dp_shard=2,zero=3,offload=parameters", marks=pytest.mark.slow),
]
RESUMED = [
    ("", "fp32"),
    ("", "bf16"),
    ("dp_replicate=4", "fp32"),
    ("dp_shard=4,zero=1", "bf16"),
    ("dp_shard=4,zero=2", "fp32"),
    ("dp_shard=4,zero=3", "fp32"),
    ("dp_shard=4,zero=3", "bf16"),
    ("dp_replicate=2,dp_shard=2,zero=2", "bf16"),
    ("dp_replicate=2,dp_shard=2,zero=1,offload=optimizer", "fp32"),
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"tied": cases.train(""), "untied": cases.train("", cases.UNTIED, steps=6)}


def on(workers: GetWorkers, layout: str) -> Workers:
    return workers(Layout.parse(layout).world_size)


def assert_same_rows(found: list[Any], wanted: list[Any], tolerance: float = TOLERANCE) -> None:
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours == pytest.approx(theirs, rel=tolerance), f"step {step + 1}"


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_same_rows(found["rows"], wanted["rows"])
    assert found["state"].keys() == wanted["state"].keys()
    for name, value in found["state"].items():
        theirs = wanted["state"][name]
        limit = MASTER_TOLERANCE
        if not name.startswith("model/"):
            limit = MOMENT_TOLERANCE * float(theirs.abs().max())
        torch.testing.assert_close(value, theirs, rtol=0, atol=limit, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_follows_one_process(
    workers: GetWorkers, alone: dict[str, Any], layout: str
) -> None:
    for found in on(workers, layout).run(cases.train, layout):
        assert_same(found, alone["tied"])


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_untied_with_biases(workers: GetWorkers, alone: dict[str, Any], layout: str) -> None:
    for found in workers(2).run(cases.train, layout, cases.UNTIED, 6):
        assert_same(found, alone["untied"])


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_micro_batches_do_not_show(alone: dict[str, Any], micro_batch: int) -> None:
    assert_same(cases.train("", micro_batch=micro_batch), alone["tied"])


@pytest.mark.parametrize(("layout", "precision"), RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    workers: GetWorkers, layout: str, precision: str
) -> None:
    """On four ranks: two add up to the same bits in either order."""
    for found in on(workers, layout).run(cases.resumed, layout, precision):
        straight, again = found["rows"]
        assert straight == again
        straight, again = found["state"]
        assert all(torch.equal(straight[name], again[name]) for name in straight)


@pytest.mark.parametrize(("fault", "layout"), faults.PLANTED)
def test_a_planted_fault_is_caught(
    workers: GetWorkers, alone: dict[str, Any], fault: str, layout: str
) -> None:
    wanted = alone["tied"]["rows"][: faults.STEPS]
    found = on(workers, layout).run(faults.train_with, fault, layout)[0]
    with pytest.raises(AssertionError, match="step"):
        assert_same_rows(found["rows"], wanted)
