"""Simulation of stages that do not cost the same."""

from __future__ import annotations

import pytest

from fivefold.axes.pp.build import SCHEDULES, build_schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.core.errors import LayoutError


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_costs_for_each_part_are_one_cost_for_all(name: str) -> None:
    schedule = build_schedule(name, 4, 8)
    one = Costs(1.0, 1.3, 0.7, 0.2)
    assert simulate(schedule, (one,) * schedule.stages) == simulate(schedule, one)


def test_the_dearest_stage_sets_the_pace_of_1f1b() -> None:
    schedule = build_schedule("1f1b", 4, 16)
    totals = [3.0, 4.0, 6.0, 3.5]
    costs = [Costs(t / 3, t / 3, t / 3) for t in totals]
    # Stage 2 is idle for one trip through those before it, there and back, and, while its second
    # forward (2) runs, waits for the first to come back from stage 3 (3.5).
    assert simulate(schedule, costs).makespan == pytest.approx(16 * 6.0 + 3.0 + 4.0 + 3.5 - 2.0)


def test_costs_are_of_the_part_in_either_direction() -> None:
    schedule = build_schedule("dualpipe", 4, 8)
    costs = [Costs(forward=1.0 + part) for part in range(4)]
    for span in simulate(schedule, costs).spans:
        if span.action.kind == "F":
            assert span.end - span.start == 1.0 + schedule.part(span.action.stage)


def test_a_cost_for_each_part_is_wanted() -> None:
    with pytest.raises(LayoutError, match=r"3 costs are given for the 4 parts of 1f1b"):
        simulate(build_schedule("1f1b", 4, 8), [Costs()] * 3)
