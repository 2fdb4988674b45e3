from __future__ import annotations

import pytest

from fivefold.axes.pp.build import SCHEDULES, build_schedule, placement_of
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.plan.search.valid import check, divisors, stages_of, takes
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_takes_is_what_building_it_takes(schedule: str) -> None:
    for ranks in (2, 3, 4):
        for microbatches in range(1, 4 * ranks + 3):
            try:
                build_schedule(schedule, ranks, microbatches)
                built = True
            except LayoutError:
                built = False
            assert takes(schedule, ranks, microbatches) == built, (ranks, microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_are_those_of_the_schedule(schedule: str) -> None:
    layout = Layout(pp=4, schedule=schedule, virtual=3 if schedule == "interleaved" else 1)  # type: ignore[arg-type]
    assert stages_of(layout) == placement_of(layout).stages


@pytest.mark.parametrize(
    ("text", "micro_batch", "says"),
    [
        ("tp=4,dp_shard=2", 1, "has 8 ranks, the cluster 16 devices; use dp_shard=4"),
        ("tp=16", 1, "does not divide the model's 40 attention heads; use tp=10"),
        ("dp_shard=16", 3, "no multiple of micro-batches of 3 on 16 data ranks"),
        ("dp_shard=4,pp=4,schedule=zb-h1", 1, "postpones weight gradients"),
        ("dp_shard=8,pp=2,zero=1,schedule=dualpipe", 16, "does not take 1 micro-batches"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_mend(text: str, micro_batch: int, says: str) -> None:
    asked = job("llama-2-13b" if "tp=16" in text else "llama-3.1-8b", "2x8xH100", 4096, 128)
    with pytest.raises(LayoutError) as refused:
        check(asked, Strategy(Layout.parse(text), micro_batch))
    assert says in str(refused.value)


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(13) == (1, 13)


def test_gradients_of_stages_are_divided_by_others_only() -> None:
    strategy = Strategy(Layout.parse("dp_shard=8,pp=2,zero=2"), 1)
    check(job("llama-3.1-8b", "2x8xH100", 4096, 128, "megatron-core"), strategy)
    with pytest.raises(LayoutError, match="would save nothing over zero=1"):
        check(job("llama-3.1-8b", "2x8xH100", 4096, 128), strategy)
