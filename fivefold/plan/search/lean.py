"""The strategy of a job that needs the least memory: whether anything fits at all."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.space import (
    Pipe,
    Split,
    Width,
    depths,
    micro_batches,
    splits,
    strategy,
    widths,
)
from fivefold.plan.workload import Strategy

MOST_LOOKED_AT = 400  # ledgers: bounds are close, the least is among the first few

LEANEST = Pipe("1f1b")
Choice = tuple[Width, int, int, Split]


def leanest(
    job: Job, estimators: Estimators, enough: float = 0.0
) -> tuple[Strategy, tuple[Ledger, ...]] | None:
    """The strategy with the least bytes on its fullest rank, or the first one within `enough`.

    None where no strategy can be run at all.
    """
    order = count()
    bounds = Bounds(job, estimators)
    heap = [(floor, next(order), choice) for floor, choice in _choices(job, bounds)]
    heapq.heapify(heap)
    best: tuple[float, Strategy, tuple[Ledger, ...]] | None = None
    for _ in range(MOST_LOOKED_AT):
        if not heap:
            break
        floor, _, choice = heapq.heappop(heap)
        if best is not None and floor >= best[0]:
            break
        width, pp, batch, split = choice
        chosen = strategy(width, pp, LEANEST, split, batch, "full")
        memory = estimators.ledger(job.shape, job.training, chosen, job.software)
        size = float(max(each.total for each in memory))
        if best is None or size < best[0]:
            best = size, chosen, memory
        if size <= enough:
            break
    return None if best is None else best[1:]


def _choices(job: Job, bounds: Bounds) -> Iterator[tuple[float, Choice]]:
    """With the smallest micro-batch, everything recomputed and 1F1B, which no others undercut."""
    for width in widths(job):
        for pp in depths(job, width):
            batch = next(micro_batches(job, width, pp), None)
            if batch is None:
                continue
            for split in splits(job, width, pp, LEANEST):
                floor = bounds.bytes(width, pp, batch, "full", LEANEST, split)
                yield floor, (width, pp, batch, split)
