"""The closed forms of makespans against the simulation of the schedules that are executed."""

from __future__ import annotations

import random

import pytest

from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.core.layout import Layout
from fivefold.plan.time.bubble import Part, busy, makespan

VIRTUAL = {"interleaved": 2}
# Largest relative difference where stages differ: by a fifth at random; by a dearer last stage.
UNEVEN = {
    "gpipe": 1e-9, "1f1b": 0.02, "interleaved": 0.10, "zb-h1": 0.06, "zbv": 0.06,
    "dualpipe": 0.07, "dualpipe-v": 0.08,
}  # fmt: skip


def _simulated(name: str, p: int, m: int, parts: list[Part]) -> float:
    schedule = build_schedule(name, p, m, VIRTUAL.get(name))
    costs = [Costs(s.forward, s.input, s.weight) for s in parts]
    return simulate(schedule, costs).makespan


def _parts(name: str, p: int) -> int:
    return build_schedule(name, p, 2 * p, VIRTUAL.get(name)).stages


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_equal_stages_take_exactly_what_the_formula_says(name: str, p: int) -> None:
    parts = [Part(1.0, 1.0, 1.0)] * _parts(name, p)
    layout = Layout(pp=p, schedule=name, virtual=VIRTUAL.get(name, 1))
    for m in (2 * p, 4 * p):
        assert makespan(layout, parts, m) == pytest.approx(_simulated(name, p, m, parts))


@pytest.mark.parametrize("name", UNEVEN)
def test_stages_that_differ(name: str) -> None:
    drawn = random.Random(2)
    for p in (2, 4, 8):
        count = _parts(name, p)
        layout = Layout(pp=p, schedule=name, virtual=VIRTUAL.get(name, 1))
        for again in (0.0, 1.0):
            for sizes in (
                [1.05, *[1.0] * (count - 2), 1.3],
                [drawn.uniform(0.8, 1.2) for _ in range(count)],
            ):
                parts = [Part(x, x * (1.1 + again), 0.8 * x) for x in sizes]
                found = makespan(layout, parts, 4 * p)
                assert found == pytest.approx(_simulated(name, p, 4 * p, parts), rel=UNEVEN[name])
                assert found >= max(busy(layout, parts, 4 * p))


def test_one_rank_has_no_bubble() -> None:
    assert makespan(Layout(), [Part(1.0, 2.0, 3.0)], 5) == 30.0


def test_more_micro_batches_make_less_of_a_bubble() -> None:
    layout, parts = Layout(pp=4), [Part(1.0, 1.0, 1.0)] * 4
    shares = [1 - 3 * m / makespan(layout, parts, m) for m in (4, 8, 16, 32)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] == pytest.approx(3 / 11)  # (p-1)/(m+p-1)
