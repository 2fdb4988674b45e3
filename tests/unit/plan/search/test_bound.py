"""A bound that is above what it bounds would hide the best strategy."""

from __future__ import annotations

import random

import pytest

from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.space import (
    RECOMPUTE,
    depths,
    micro_batches,
    pipes,
    splits,
    strategy,
    widths,
)
from tests.unit.plan.search.jobs import job

CASES = [
    ("llama-3.1-8b", "2x8xH100", 8192, 64),
    ("mixtral-8x7b", "2x8xA100-80GB", 4096, 64),
    ("deepseek-v3", "16x8xH800", 4096, 256),
    ("gpt3-13b", "4x8xA100-80GB", 2048, 96),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_no_bound_is_above_what_it_bounds(case: tuple[str, str, int, int]) -> None:
    asked, found = job(*case), estimators()
    bounds, chance = Bounds(asked, found), random.Random(0)
    shapes = [(w, pp) for w in widths(asked) for pp in depths(asked, w)]
    seen = 0
    while seen < 60:
        width, pp = chance.choice(shapes)
        batches = list(micro_batches(asked, width, pp))
        if not batches:
            continue
        batch, mode = chance.choice(batches), chance.choice(RECOMPUTE)
        count = asked.training.global_batch * width.ranks * pp // (asked.devices * batch)
        pipe = chance.choice(list(pipes(asked, pp, count)))
        options = list(splits(asked, width, pp, pipe))
        if not options:
            continue
        split = chance.choice(options)
        chosen = strategy(width, pp, pipe, split, batch, mode)
        time = found.step_time(asked.shape, asked.training, chosen, asked.cluster, asked.software)
        floor = bounds.seconds(width, pp, batch, mode, pipe)
        assert floor <= time.total * (1 + 1e-9), chosen
        assert bounds.seconds(width, pp, batch, mode, None) <= floor
        ledgers = found.ledger(asked.shape, asked.training, chosen, asked.software)
        least = bounds.bytes(width, pp, batch, mode, pipe, split)
        assert least <= max(each.total for each in ledgers), chosen
        assert bounds.bytes(width, pp, batch, mode) <= least * (1 + 1e-9)
        seen += 1
