"""Around a good strategy: other orders of its axes, and other numbers of ranks that share state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from fivefold.core.layout import ORDER, Layout
from fivefold.plan.search.found import Found, judge
from fivefold.plan.search.job import Estimators
from fivefold.plan.search.space import Pipe, Width, of_shards
from fivefold.plan.search.valid import divisors
from fivefold.plan.workload import Strategy

ROOM = 0.02  # of memory: what has more may lose it down to that
GAIN = 0.002  # of the time: less is no reason for another order


def refine(found: Found, estimators: Estimators) -> Found:
    """The best of `found` and its neighbours that leave room."""
    least = min(found.room, found.job.cluster.device.memory * ROOM)
    for neighbours in (shards, orders):
        for strategy in neighbours(found):
            other = judge(found.job, strategy, estimators)
            if other.room >= least and other.seconds < found.seconds * (1 - GAIN):
                found = other
    return found


def orders(found: Found) -> Iterator[Strategy]:
    """Other orders of the axes; one of those that are the same where axes have one way."""
    layout = found.strategy.layout
    divided = [axis for axis in ORDER if getattr(layout, axis) > 1]
    rest = tuple(axis for axis in ORDER if axis not in divided)
    for order in permutations(divided):
        if order != tuple(axis for axis in layout.order if axis in divided):
            update = {"order": (*rest, *order)}
            yield replace(found.strategy, layout=layout.model_copy(update=update))


def shards(found: Found) -> Iterator[Strategy]:
    """All numbers of data ranks that may share state."""
    layout = found.strategy.layout
    width = width_of(layout)
    pipe = Pipe(layout.schedule, layout.virtual)
    for shard in divisors(layout.dp):
        for split in of_shards(found.job, width, layout.pp, pipe, shard):
            update = {
                "dp_replicate": split.dp_replicate, "dp_shard": shard, "zero": split.zero,
            }  # fmt: skip
            yield replace(found.strategy, layout=layout.model_copy(update=update))


def width_of(layout: Layout) -> Width:
    """The part of a layout that is inside layers."""
    return Width(
        layout.tp, layout.cp, layout.ulysses, layout.cp_kind, layout.ep, layout.sequence_parallel
    )
