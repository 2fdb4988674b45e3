from __future__ import annotations

import pytest

from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import Found, judge
from fivefold.plan.search.front import front
from fivefold.plan.search.job import Job
from fivefold.plan.search.search import CLOSE, FINER, search
from fivefold.plan.search.space import (
    RECOMPUTE,
    depths,
    micro_batches,
    pipes,
    splits,
    strategy,
    widths,
)
from fivefold.plan.search.valid import check
from tests.unit.plan.search.jobs import job


def everything(asked: Job) -> list[Found]:
    """All strategies of the space that fit, judged one by one."""
    found = []
    for width in widths(asked):
        for pp in depths(asked, width):
            for batch in micro_batches(asked, width, pp):
                count = asked.training.global_batch * width.ranks * pp // (asked.devices * batch)
                for pipe in pipes(asked, pp, count):
                    for split in splits(asked, width, pp, pipe):
                        if split.zero == 2 and count > 1:
                            continue
                        for mode in RECOMPUTE:
                            chosen = strategy(width, pp, pipe, split, batch, mode)
                            found.append(judge(asked, chosen, estimators()))
    return [each for each in found if each.fits]


def shape_of(found: Found) -> tuple[int, ...]:
    layout = found.strategy.layout
    return layout.tp, layout.cp, layout.ep, layout.pp


@pytest.mark.parametrize(
    "case",
    [
        ("llama-3.1-8b", "4xH100", 4096, 8),
        ("llama-2-13b", "2x4xA100-80GB", 2048, 8),
        pytest.param(("mixtral-8x7b", "8xH200", 1024, 4), marks=pytest.mark.slow),
    ],
)
def test_nothing_that_was_not_judged_is_better(case: tuple[str, str, int, int]) -> None:
    asked = job(*case)
    result, all_of_them = search(asked, estimators(), wanted=4), everything(asked)
    best = min(each.seconds for each in all_of_them)
    assert result.best[0].seconds <= best * (1 + CLOSE)
    shapes: dict[tuple[int, ...], float] = {}
    for each in all_of_them:
        key = shape_of(each)
        shapes[key] = min(each.seconds, shapes.get(key, each.seconds))
    for each, wanted in zip(result.best, sorted(shapes.values()), strict=False):
        assert each.seconds <= shapes[shape_of(each)] * (1 + CLOSE), each.said()
        assert each.seconds <= wanted * (1 + CLOSE), each.said()
    assert result.counts.judged < 0.6 * len(all_of_them)
    memory = asked.cluster.device.memory
    for point in front(all_of_them, lambda each: (each.seconds, each.bytes)):
        if point.seconds > 1.3 * best:
            continue
        assert any(
            each.seconds <= point.seconds * (1 + CLOSE) * (1 + CLOSE)
            and each.bytes <= point.bytes + FINER * memory
            for each in result.front
        ), point.said()


def test_everything_that_is_found_can_be_run_and_fits() -> None:
    asked = job("mixtral-8x7b", "2x8xH100", 4096, 64)
    result = search(asked, estimators())
    assert len(result.best) == 8
    for each in (*result.best, *result.front):
        check(asked, each.strategy)
        assert each.fits
    seconds = [each.seconds for each in result.best]
    assert seconds == sorted(seconds)
    shapes = {
        (s.tp, s.pp, s.cp, s.ep) for s in (each.strategy.layout for each in result.best)
    }  # fmt: skip
    assert len(shapes) == len(result.best)


def test_the_front_has_nothing_that_another_beats() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.5, 2.5), (1.0, 3.0)]
    assert front(points, lambda each: each) == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]


def test_sixteen_thousand_devices_take_few_judgements() -> None:
    asked = job("llama-3.1-405b", "2048x8xH100", 8192, 2048)
    result = search(asked, estimators(), wanted=1, with_front=False)
    assert result.best[0].fits
    assert result.counts.judged < 500
