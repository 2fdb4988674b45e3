"""Compressed gradients equal what the papers' algorithms give, hold the sum, and go on after a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.dp.compression.choose import check_compression
from fivefold.core.config import CommunicationSection
from fivefold.core.errors import ConfigError, LayoutError
from fivefold.core.layout import Layout
from fivefold.core.resolve import resolve
from tests.dist import cases, compression_cases
from tests.dist.compression_cases import SHAPES, STEPS, gradients, section
from tests.dist.harness import Workers
from tests.dist.test_data_axis import assert_same, assert_same_rows

GetWorkers = Callable[[int], Workers]
EXACT = 1e-12  # fp64, relative to the largest element
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
RATIO = 0.05
COUNT = round(RATIO * NUMEL)


def totals(ranks: int, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """The exact sums of each step."""
    each = [[gradients(rank, step, scale) for rank in range(ranks)] for step in range(STEPS)]
    return [{name: sum(rank[name] for rank in step) for name in SHAPES} for step in each]  # type: ignore[misc]


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[name].flatten() for name in SHAPES])


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()), check_dtype=False
    )


def assert_power_sgd(found: dict[str, Any], ranks: int, memories: list[dict[str, Tensor]]) -> None:
    *wanted, memory = compression_cases.power_sgd(totals(ranks), 2)
    for ours, theirs in zip(found["steps"], wanted, strict=True):
        for name in SHAPES:
            assert_close(ours[name], theirs[name])
    for name in ("a", "c", "experts"):
        assert_close(sum(m[f"memory/{name}"] for m in memories), memory[name])  # type: ignore[arg-type]


def assert_top_k(found: dict[str, Any], ranks: int, memories: list[dict[str, Tensor]]) -> None:
    *wanted, memory = compression_cases.top_k(ranks, COUNT)
    for ours, theirs in zip(found["steps"], wanted, strict=True):
        assert_close(flat(ours), theirs)
    assert_close(sum(m["memory/a"] for m in memories), memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4])
def test_power_sgd_is_the_papers_on_the_sum(workers: GetWorkers, ranks: int) -> None:
    everyone = workers(ranks).run(compression_cases.reduced, section("powersgd", rank=2))
    assert_power_sgd(everyone[0], ranks, [found["state"] for found in everyone])
    assert_same_on_all(everyone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_top_k_is_the_papers_with_as_many_workers(workers: GetWorkers, ranks: int) -> None:
    everyone = workers(ranks).run(compression_cases.reduced, section("topk", ratio=RATIO))
    assert_top_k(everyone[0], ranks, [found["state"] for found in everyone])
    assert_same_on_all(everyone)


def assert_same_on_all(everyone: list[dict[str, Any]]) -> None:
    for found in everyone[1:]:
        for ours, theirs in zip(found["steps"], everyone[0]["steps"], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "chosen", [section("powersgd", rank=1), section("topk", ratio=0.02)], ids=["powersgd", "topk"]
)
def test_nothing_is_lost(workers: GetWorkers, ranks: int, chosen: CommunicationSection) -> None:
    """What came out so far and what the ranks still hold add up to all gradients."""
    everyone = workers(ranks).run(compression_cases.reduced, chosen)
    arrived = sum(flat(step) for step in everyone[0]["steps"])
    if chosen.compression == "topk":
        held = sum(found["state"]["memory/a"] for found in everyone)
    else:
        held = flat({
            name: sum(found["state"].get(f"memory/{name}", torch.zeros(SHAPES[name]))
                      for found in everyone)
            for name in SHAPES
        })  # fmt: skip
    assert float(held.abs().max()) > 1.0  # type: ignore[union-attr]
    assert_close(arrived + held, sum(flat(step) for step in totals(ranks)))  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    "chosen",
    [
        section("none"),
        section("powersgd", rank=16),
        section("topk", ratio=1.0),
        section("topk", ratio=0.01, warmup_steps=STEPS),
        section("powersgd", rank=1, warmup_steps=STEPS),
    ],
    ids=["none", "full-rank", "all-elements", "topk-warmup", "powersgd-warmup"],
)
def test_without_loss_it_is_the_sum(workers: GetWorkers, chosen: CommunicationSection) -> None:
    for found in workers(4).run(compression_cases.reduced, chosen):
        for ours, theirs in zip(found["steps"], totals(4), strict=True):
            assert_close(flat(ours), flat(theirs))


def test_warmup_ends(workers: GetWorkers) -> None:
    """Two whole steps, and then what a run without warm-up does in its first two."""
    late = section("topk", ratio=RATIO, warmup_steps=2)
    found = workers(2).run(compression_cases.reduced, late)[0]["steps"]
    for ours, theirs in zip(found[:2], totals(2), strict=False):
        assert_close(flat(ours), flat(theirs))
    assert int((flat(found[2]) != 0).sum()) <= 2 * COUNT


def test_a_gradient_of_that_rank_comes_whole(workers: GetWorkers) -> None:
    assert all(workers(2).run(_low_rank))


def _low_rank() -> bool:
    compressor, bucket, whole = compression_cases.make(section("powersgd", rank=3), torch.float64)
    wanted = torch.zeros_like(whole)
    for view, out in zip(bucket.views(whole), bucket.views(wanted), strict=True):
        if view.ndim > 1:
            left = torch.randn(*view.shape[:-1], 3, dtype=torch.float64)
            view.copy_(left @ torch.randn(*view.shape[:-2], 3, view.shape[-1]).double())
        out.copy_(view)
    # The sum of both ranks' has rank 3 only if both ranks' have the same: as drawn here they do
    # not, so one of them stays away.
    if torch.distributed.get_rank():
        whole.zero_()
    torch.distributed.broadcast(wanted, 0)
    compression_cases.finish(compressor, whole)
    assert_close(whole, wanted)
    return True


@pytest.mark.parametrize(("kind", "bits"), [("fp16", 11), ("bf16", 8)])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_a_narrow_format_rounds_and_no_more(
    workers: GetWorkers, kind: str, bits: int, scale: float
) -> None:
    """Four roundings of ranks and three of sums, each to `bits`; fp16 whatever the magnitude."""
    arguments = (section(kind), torch.float32, scale)
    for found in workers(4).run(compression_cases.reduced, *arguments):
        for ours, theirs in zip(found["steps"], totals(4, scale), strict=True):
            assert_close(flat(ours).double(), flat(theirs), 7 * 2.0**-bits)


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "powersgd", "topk"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(workers: GetWorkers, kind: str, value: float) -> None:
    """On every rank, where one had it: the step looks at the norm and stops, or skips."""
    assert not any(workers(2).run(_broken, section(kind, rank=2), value))


def _broken(chosen: CommunicationSection, value: float) -> bool:
    compressor, _, whole = compression_cases.make(chosen, torch.float32)
    whole[:] = torch.randn(len(whole))
    if torch.distributed.get_rank() == 1:
        whole[17] = value
    compression_cases.finish(compressor, whole)
    return bool(whole.norm().isfinite())


RANK = 2
FACTORS = RANK * ((24 + 16) + 3 * (10 + 12) + (16 + 40)) + 7 + 6
BYTES = {
    "none": 4 * NUMEL, "bf16": 2 * NUMEL, "fp16": 2 * NUMEL + 4, "powersgd": 4 * FACTORS,
    "topk": 8 * COUNT,
}  # fmt: skip


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_are_those_of_the_formula(workers: GetWorkers, kind: str) -> None:
    chosen = section(kind, rank=RANK, ratio=RATIO)
    found = workers(2).run(compression_cases.reduced, chosen, torch.float32)
    assert found[0]["bytes"] == BYTES[kind]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("feedback_dropped", "powersgd"), ("feedback_dropped", "topk"),
        ("not_orthonormal", "powersgd"), ("cold_start", "powersgd"),
        ("own_right_factors", "powersgd"), ("largest_with_sign", "topk"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_caught(workers: GetWorkers, fault: str, kind: str) -> None:
    chosen = section(kind, rank=2, ratio=RATIO)
    everyone = workers(2).run(compression_cases.reduced, chosen, torch.float64, 1.0, fault)
    check = assert_power_sgd if kind == "powersgd" else assert_top_k
    with pytest.raises(AssertionError):
        check(everyone[0], 2, [found["state"] for found in everyone])


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return cases.train("", steps=6)


LOSSLESS = [section("powersgd", rank=99), section("topk", ratio=1.0)]


@pytest.mark.parametrize(
    "layout",
    ["dp_replicate=2", "dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=1", "cp=2,zero=1"],
)
@pytest.mark.parametrize("chosen", LOSSLESS, ids=["powersgd", "topk"])
def test_training_without_loss_follows_one_process(
    workers: GetWorkers, alone: dict[str, Any], layout: str, chosen: CommunicationSection
) -> None:
    options = {"communication": chosen}
    arguments = (layout, cases.CONFIG, 6, "fp32", None, None, options)
    for found in workers(Layout.parse(layout).world_size).run(cases.train, *arguments):
        assert_same(found, alone)


def test_power_sgd_does_not_see_how_many_ranks_there_are(workers: GetWorkers) -> None:
    """It is linear in the ranks' gradients: their sum alone counts."""
    options = {"communication": section("powersgd", rank=2)}
    arguments = (cases.CONFIG, 6, "fp64", None, None, options)
    two = workers(2).run(cases.train, "dp_replicate=2", *arguments)[0]["rows"]
    four = workers(4).run(cases.train, "dp_shard=4,zero=1", *arguments)[0]["rows"]
    assert_same_rows(four, two, 1e-9)


@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        ("dp_replicate=4", section("powersgd", rank=2)),
        ("dp_shard=4,zero=1", section("topk", ratio=0.05)),
        ("dp_replicate=2,dp_shard=2,zero=1", section("topk", ratio=0.05, warmup_steps=3)),
        ("tp=2,dp_replicate=2", section("powersgd", rank=2, warmup_steps=1)),
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(
    workers: GetWorkers, layout: str, chosen: CommunicationSection
) -> None:
    for found in workers(4).run(compression_cases.resumed, layout, chosen):
        for straight, again in (found["state"], found["carried"]):
            assert straight.keys() == again.keys()
            assert all(torch.equal(straight[name], again[name]) for name in straight)
        assert found["rows"][0] == found["rows"][1]


def test_without_its_memories_it_would_not(workers: GetWorkers) -> None:
    arguments = ("dp_replicate=2", section("topk", ratio=0.05), False)
    straight, again = workers(2).run(compression_cases.resumed, *arguments)[0]["rows"]
    assert straight != again


@pytest.mark.parametrize(
    ("layout", "mend"),
    [
        ("dp_shard=2,zero=2", "zero=2 divides"),
        ("dp_shard=2", "zero=3 divides"),
        ("cp=2", "zero=3 divides"),
        ("offload=parameters", "offload=parameters divides"),
    ],
)
@pytest.mark.parametrize("kind", ["fp16", "powersgd", "topk"])
def test_divided_gradients_are_refused(layout: str, mend: str, kind: str) -> None:
    with pytest.raises(LayoutError, match=mend) as caught:
        check_compression(section(kind), Layout.parse(layout))
    assert "use zero=1" in caught.value.mend
    check_compression(section("bf16"), Layout.parse(layout))


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_a_changing_loss_scale_is_refused(kind: str) -> None:
    sets = [f"communication.compression={kind}", "precision.dtype=fp16"]
    with pytest.raises(ConfigError, match="loss scale"):
        resolve("quickstart", sets=sets)
    assert resolve("quickstart", sets=["communication.compression=fp16", sets[1]])


@pytest.mark.parametrize("layout", ["dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_bf16_goes_with_divided_gradients(workers: GetWorkers, layout: str) -> None:
    """The same bits as `precision.reduce: bf16`."""
    arguments = (layout, cases.CONFIG, 3, "fp32", None, None)
    one = workers(2).run(cases.train, *arguments, {"communication": section("bf16")})[0]
    other = workers(2).run(cases.train, *arguments, {"reduce": "bf16"})[0]
    assert one["rows"] == other["rows"]
