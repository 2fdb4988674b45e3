"""Every data layout gives the numbers that one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from tests.dist import cases, faults

# fp32 sums in another order: relative difference of loss and gradient norm over 20 steps.
TOLERANCE = 1e-5
LAYOUTS = [
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=3",
    "dp_replicate=2,offload=optimizer",
    "dp_shard=2,zero=1,offload=optimizer",
    "dp_shard=2,zero=2,offload=optimizer",
    "dp_shard=2,zero=3,offload=parameters",
    "dp_replicate=4",
    "dp_shard=4,zero=1",
    "dp_shard=4,zero=2",
    "dp_shard=4,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2,zero=3",
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"tied": cases.train(""), "untied": cases.train("", cases.UNTIED, steps=6)}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for step, (ours, theirs) in enumerate(zip(found["rows"], wanted["rows"], strict=True)):
        assert ours == pytest.approx(theirs, rel=TOLERANCE), f"step {step + 1}"
    for kind in ("masters", "moments"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, value in found[kind].items():
            torch.testing.assert_close(value, wanted[kind][name], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_follows_one_process(workers: Any, alone: dict[str, Any], layout: str) -> None:
    for found in workers(Layout.parse(layout).world_size).run(cases.train, layout):
        assert_same(found, alone["tied"])


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_untied_with_biases(workers: Any, alone: dict[str, Any], layout: str) -> None:
    for found in workers(2).run(cases.train, layout, cases.UNTIED, 6):
        assert_same(found, alone["untied"])


def test_micro_batches_do_not_show(alone: dict[str, Any]) -> None:
    for micro_batch in (2, 8):
        assert_same(cases.train("", micro_batch=micro_batch), alone["tied"])


@pytest.mark.parametrize("layout", ["", "dp_shard=2,zero=3", "dp_shard=2,zero=2"])
@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, {"recompute": "selective"}, {"recompute": "full", "recompute_every": 2}],
)
def test_recomputation_does_not_show(
    workers: Any, alone: dict[str, Any], layout: str, options: dict[str, Any]
) -> None:
    arguments = (layout, cases.CONFIG, 4, "fp32", 2, None, options)
    wanted = {**alone["tied"], "rows": alone["tied"]["rows"][:4]}
    size = Layout.parse(layout).world_size
    found = workers(size).run(cases.train, *arguments)[0] if size > 1 else cases.train(*arguments)
    assert [r[0] for r in found["rows"]] == pytest.approx([r[0] for r in wanted["rows"]], rel=TOLERANCE)
    assert [r[1] for r in found["rows"]] == pytest.approx([r[1] for r in wanted["rows"]], rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["", "dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_low_precision_stays_near_fp32(
    workers: Any, alone: dict[str, Any], layout: str, precision: str
) -> None:
    """bf16 keeps 8 bits: losses within 1%, norms within 3% of fp32 over the first ten steps."""
    arguments = (layout, cases.CONFIG, 10, precision)
    size = Layout.parse(layout).world_size
    found = workers(size).run(cases.train, *arguments)[0] if size > 1 else cases.train(*arguments)
    for (loss, norm), (fp32_loss, fp32_norm) in zip(found["rows"], alone["tied"]["rows"], strict=False):
        assert loss == pytest.approx(fp32_loss, rel=0.01)
        assert norm == pytest.approx(fp32_norm, rel=0.03)
    assert all(value.dtype == torch.float32 for value in found["masters"].values())


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2"])
@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_a_planted_fault_is_caught(
    workers: Any, alone: dict[str, Any], layout: str, fault: str
) -> None:
    found = workers(2).run(faults.train_with, fault, layout)[0]
    with pytest.raises(AssertionError):
        assert_same(found, alone["tied"])


def test_layouts_that_cannot_run() -> None:
    from fivefold.axes.mesh import check_layout

    for text, message in [
        ("tp=2", "tp=2: this axis is not built yet"),
        ("ep=2", "ep=2: this axis is not built yet"),
        ("dp_shard=2,zero=2,offload=parameters", "zero=3"),
        ("offload=parameters", "dp_shard > 1"),
        ("dp_shard=2,offload=optimizer", "offload=parameters"),
    ]:
        with pytest.raises(LayoutError, match=message):
            check_layout(Layout.parse(text))
