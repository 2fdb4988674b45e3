"""Buffers that are no part of a block: messages of the pipeline, buckets of the data axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fivefold.core.layout import Layout
from fivefold.plan.memory.block import Bytes
from fivefold.plan.memory.flight import WINDOW
from fivefold.plan.memory.parameters import Weight
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.states import expert_shards, is_sharded


def messages(place: Place, layout: Layout, rank: int, microbatches: int) -> Bytes:
    """Hidden states and gradients that were sent: the last ones are kept for a while.

    What comes is taken over by the action that waits for it, and counted there.
    """
    if layout.pp == 1:
        return Counter()
    ends = (rank > 0) + (rank < layout.pp - 1)
    comes = 0
    if layout.schedule == "interleaved":  # all around; the next forward's comes early
        ends, comes = min(2, layout.pp - 1), int(rank > 0)
    return Counter({"messages": (ends * min(WINDOW, microbatches) + comes) * place.hidden})


Placed = tuple[int, Weight]  # with the number of its block


def buckets(weights: Sequence[Placed], limit: int) -> list[list[Placed]]:
    """As `axes.dp.bucket.make_buckets` groups them: last first, closed once `limit` is reached."""
    found: list[list[Placed]] = []
    held: list[Placed] = []
    size = 0
    for placed in reversed(weights):
        held.append(placed)
        size += placed[1].elements * WIDE
        if size >= limit:
            found.append(held)
            held, size = [], 0
    return [*found, held] if held else found


def at_the_end(
    place: Place, layout: Layout, weights: Sequence[Weight], first: bool, last: bool
) -> Bytes:
    """After the last backward: parameters are gathered by buckets, gradients of both ends joined."""
    found: Bytes = Counter()
    if is_sharded(layout):
        return found
    limit = place.software.bucket
    for expert, ranks in ((False, layout.shards), (True, expert_shards(layout))):
        if ranks == 1:
            continue
        part = [(0, w) for w in weights if w.expert is expert]
        for bucket in buckets(part, limit):
            size = sum(w.shard(ranks) for _, w in bucket) * (ranks + 1) * place.element
            found["publishing"] = max(found["publishing"], size)
    if layout.pp > 1 and first != last and place.shape.config.tie_embeddings:
        table = next(w for w in weights if w.name == "embedding.weight")
        found["reduce"] = table.elements * WIDE
    return found
