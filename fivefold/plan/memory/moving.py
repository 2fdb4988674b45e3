"""Buckets of the data axis, and what the end of a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fivefold.core.layout import Layout
from fivefold.plan.memory.block import Bytes
from fivefold.plan.memory.parameters import Weight
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.states import expert_shards, is_sharded


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
