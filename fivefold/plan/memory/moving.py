"""Buckets of the data axis, and what the end of a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.plan.memory.parameters import Weight
from fivefold.plan.memory.place import WIDE


class Placed(NamedTuple):
    """A parameter, and the number of its block."""

    block: int
    weight: Weight


def buckets(weights: Sequence[Placed], limit: int) -> list[list[Placed]]:
    """As `axes.dp.bucket.make_buckets` groups them: last first, closed once `limit` is reached."""
    found: list[list[Placed]] = []
    held: list[Placed] = []
    size = 0
    for placed in reversed(weights):
        held.append(placed)
        size += placed.weight.elements * WIDE
        if size >= limit:
            found.append(held)
            held, size = [], 0
    return [*found, held] if held else found


def publishing(weights: Sequence[Weight], ranks: dict[bool, int], limit: int, element: int) -> int:
    """Bytes of the largest bucket of new parameters, this rank's rows and everybody's; `ranks`
    divide those of experts (True) and all others."""
    most = 0
    for expert, count in ranks.items():
        if count == 1:
            continue
        part = [Placed(0, w) for w in weights if w.expert is expert]
        for bucket in buckets(part, limit):
            size = sum(placed.weight.shard(count) for placed in bucket)
            most = max(most, size * (count + 1) * element)
    return most
