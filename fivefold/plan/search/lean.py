"""The strategy of a job that needs the least memory: whether anything fits at all."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.job import Estimators, Job, Memory
from fivefold.plan.search.space import (
    RECOMPUTE,
    Pipe,
    Split,
    Width,
    depths,
    micro_batches,
    pipes,
    splits,
    strategy,
    widths,
)
from fivefold.plan.workload import Recompute, Strategy

MOST_LOOKED_AT = 400  # ledgers: bounds are close, the least is among the first few

Choice = tuple[Width, int, int, Recompute, Pipe, Split]


def leanest(
    job: Job, estimators: Estimators, enough: float = 0.0
) -> tuple[Strategy, tuple[Memory, ...]] | None:
    """The strategy with the least bytes on its fullest rank, or the first one within `enough`.

    None where no strategy can be run at all.
    """
    order = count()
    bounds = Bounds(job, estimators)
    heap = [(floor, next(order), choice) for floor, choice in _choices(job, bounds)]
    heapq.heapify(heap)
    best: tuple[float, Strategy, tuple[Memory, ...]] | None = None
    for _ in range(MOST_LOOKED_AT):
        if not heap:
            break
        floor, _, choice = heapq.heappop(heap)
        if best is not None and floor >= best[0]:
            break
        width, pp, batch, mode, pipe, split = choice
        chosen = strategy(width, pp, pipe, split, batch, mode)
        memory = estimators.ledger(job.shape, job.training, chosen, job.software)
        size = float(max(each.total for each in memory))
        if best is None or size < best[0]:
            best = size, chosen, memory
        if size <= enough:
            break
    return None if best is None else best[1:]


def _choices(job: Job, bounds: Bounds) -> Iterator[tuple[float, Choice]]:
    """With the smallest micro-batch, which no larger one undercuts."""
    for width in widths(job):
        for pp in depths(job, width):
            batch = next(micro_batches(job, width, pp), None)
            if batch is None:
                continue
            dp = job.devices // (width.ranks * pp)
            microbatches = job.training.global_batch // (dp * batch)
            for pipe in pipes(job, pp, microbatches):
                for split in splits(job, width, pp, pipe):
                    for mode in RECOMPUTE[1:]:
                        floor = bounds.bytes(width, pp, batch, mode, pipe, split)
                        yield floor, (width, pp, batch, mode, pipe, split)
