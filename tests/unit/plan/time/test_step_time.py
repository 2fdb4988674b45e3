"""A step's time: what adds up, what grows with what, and the simulation beside the closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.core.errors import LayoutError, PlanError
from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import FIVEFOLD, MEGATRON_2021, MEGATRON_2022, software
from fivefold.plan.time import StepTime, simulated_step, step_time
from fivefold.plan.workload import Strategy, Training

H100 = cluster("8x8xH100")
LLAMA = shape("llama2-70b")
WORK = Training(4096, 512)
LAYOUTS = (
    "tp=8,pp=4,dp_shard=2,zero=1",
    "tp=8,dp_shard=8,zero=3",
    "tp=4,pp=2,dp_shard=8,zero=1,schedule=interleaved,virtual=4",
    "tp=8,pp=8,schedule=zb-h1",
    "tp=4,pp=4,dp_shard=4,zero=1,schedule=zbv",
    "tp=4,pp=4,dp_shard=4,zero=1,schedule=dualpipe",
    "tp=4,cp=4,dp_shard=4,zero=1",
    "dp_replicate=8,tp=8",
    "dp_replicate=2,dp_shard=4,tp=8,zero=3",
)


def step(
    layout: str,
    *,
    micro: int = 1,
    recompute: str = "none",
    model: ModelShape = LLAMA,
    work: Training = WORK,
    servers: Cluster = H100,
) -> StepTime:
    strategy = Strategy(Layout.parse(layout), micro, recompute)  # type: ignore[arg-type]
    return step_time(model, work, strategy, servers, FIVEFOLD)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_add_up_to_the_step(layout: str) -> None:
    found = step(layout)
    assert sum(seconds for _, seconds in found.pieces) == pytest.approx(found.total)
    assert found.compute == pytest.approx(
        found.products + found.attention + found.elementwise + found.host
    )
    assert found.tokens_per_second == pytest.approx(512 * 4096 / found.total)
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_actions_that_are_executed_take_as_long(layout: str) -> None:
    strategy = Strategy(Layout.parse(layout), 1)
    fast = step_time(LLAMA, WORK, strategy, H100, FIVEFOLD)
    slow, timeline = simulated_step(LLAMA, WORK, strategy, H100, FIVEFOLD)
    assert fast.total == pytest.approx(slow.total, rel=0.05)
    assert timeline.makespan <= slow.total
    assert timeline.schedule.ranks == strategy.layout.pp


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved,virtual=2"])
def test_sends_that_block_are_in_either(schedule: str) -> None:
    strategy = Strategy(Layout.parse(f"pp=8,tp=8,sequence_parallel=false,schedule={schedule}"), 1)
    fast = step_time(LLAMA, Training(4096, 64), strategy, H100, MEGATRON_2021)
    slow, _ = simulated_step(LLAMA, Training(4096, 64), strategy, H100, MEGATRON_2021)
    assert fast.exposed["pp"] == pytest.approx(slow.exposed["pp"], rel=0.3)
    assert fast.total == pytest.approx(slow.total, rel=0.03)


def test_full_recomputation_is_a_forward_more() -> None:
    none, full = step(LAYOUTS[0]), step(LAYOUTS[0], recompute="full")
    assert none.recompute == 0
    assert full.recompute == pytest.approx(none.compute / 3, rel=0.1)
    assert full.hfu > full.mfu and none.hfu == none.mfu


def test_selective_recomputation_is_between() -> None:
    none, some, full = (step(LAYOUTS[0], recompute=r) for r in ("none", "selective", "full"))
    assert none.total < some.total < full.total


def test_tensor_ranks_across_servers_cost_more() -> None:
    inside, across = step("tp=8,dp_shard=8,zero=1"), step("tp=16,dp_shard=4,zero=1")
    assert across.exposed["tp"] > 2 * inside.exposed["tp"]
    rack = cluster("16x4xGB200")
    there = step("tp=16,dp_shard=4,zero=1", servers=rack)
    assert there.exposed["tp"] < 0.6 * across.exposed["tp"]


def test_zero_3_gathers_for_each_micro_batch() -> None:
    once, often = step("tp=8,dp_shard=8,zero=1"), step("tp=8,dp_shard=8,zero=3")
    moved = [found.exposed.get("dp", 0) + found.hidden.get("dp", 0) for found in (once, often)]
    assert moved[1] > 10 * moved[0]
    large = step("tp=8,dp_shard=8,zero=3", micro=16, work=Training(4096, 1024))
    assert large.hidden["dp"] > large.exposed.get("dp", 0)  # beside computation


def test_more_experts_parallel_exchange_more() -> None:
    model, servers = shape("mixtral-8x7b"), cluster("4x8xH100")
    work = Training(4096, 256)
    one = step("dp_shard=32,ep=1,zero=1", model=model, work=work, servers=servers)
    eight = step("dp_shard=32,ep=8,zero=1", model=model, work=work, servers=servers)
    assert "ep" not in one.exposed and eight.exposed["ep"] > 0


def test_context_ranks_divide_attention_and_hide_their_messages() -> None:
    long = Training(131_072, 64)
    one = step("tp=8,dp_shard=8,zero=1", work=long)
    ring = step("tp=8,cp=8,zero=1", work=long)
    assert ring.attention == pytest.approx(one.attention, rel=0.05)
    assert ring.hidden["cp"] > ring.exposed.get("cp", 0)


def test_offloading_is_slower() -> None:
    assert (
        step("tp=8,dp_shard=8,zero=1,offload=optimizer").optimizer > 3 * step(LAYOUTS[7]).optimizer
    )


def test_small_work_waits_for_the_host() -> None:
    small = shape("gpt2-124m")
    found = step("dp_shard=8", model=small, work=Training(128, 64), servers=cluster("8xH100"))
    assert found.host > 0.3 * found.total


def test_eight_bits_are_faster_and_not_twice() -> None:
    wide, narrow = step(LAYOUTS[0]), step(LAYOUTS[0], work=replace(WORK, compute="fp8"))
    assert 1.2 < wide.total / narrow.total < 2


def test_an_odd_vocabulary_slows_its_product() -> None:
    from fivefold.plan.models.gpt import gpt

    servers, work = cluster("8xA100-80GB"), Training(1024, 64, compute="fp16")
    odd, even = (
        step_time(
            gpt("x", 12, 1024, 16, vocabulary=words, positions=1024), work,
            Strategy(Layout(dp_replicate=8), 4), servers, MEGATRON_2022,
        )
        for words in (50_257, 50_304)
    )  # fmt: skip
    assert odd.products > 1.2 * even.products


def test_bad_input_names_itself() -> None:
    with pytest.raises(PlanError, match="global batch of 512 is no multiple of 24, micro-batch 3"):
        step("tp=8,dp_shard=8", micro=3)
    with pytest.raises(LayoutError, match="add up"):
        step("tp=8,pp=4,dp_shard=2,zero=1,stage_layers=1/1/1/1")
    with pytest.raises(PlanError, match="no products in fp8"):
        step("dp_shard=8", work=replace(WORK, compute="fp8"), servers=cluster("8xA100-80GB"))
    with pytest.raises(PlanError, match="H100 has no products in mxfp8; use precision=fp8"):
        step("dp_shard=8", work=replace(WORK, compute="mxfp8"), servers=cluster("8xH100"))
    with pytest.raises(PlanError, match=r"known: .*megatron-2022"):
        software("megatron-2012")
