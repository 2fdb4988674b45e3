"""Traffic of the data axis: gradients are summed, parameters gathered, and what of it is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fivefold.core.layout import Layout
from fivefold.plan.communication import Group, expert_groups, group, slowed
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.memory.states import is_sharded
from fivefold.plan.shape import ModelShape
from fivefold.plan.time.work import Kinds
from fivefold.plan.workload import Software


@dataclass(frozen=True)
class Held:
    """Elements that a rank computes with: dense, and those of experts."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Traffic:
    """Seconds of a step on one rank. `exposed` is what is waited for, of `exposed + hidden`."""

    exposed: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Ways:
    """Groups of the data axis: those that divide a copy's state, and copies."""

    shards: Group
    copies: Group
    expert_shards: Group

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Ways:
        """Of a layout's ranks on a cluster."""
        return cls(
            group(cluster, layout, ("dp_shard", "cp")),
            group(cluster, layout, ("dp_replicate",)),
            expert_groups(cluster, layout)[1],
        )

    def pairs(self, held: Held) -> tuple[tuple[int, Group], ...]:
        """Elements, and the ranks that divide them."""
        return (held.dense, self.shards), (held.experts, self.expert_shards)


@lru_cache(maxsize=8192)
def held(shape: ModelShape, kinds: Kinds, tp: int, ep: int) -> Held:
    """Of a part of the model, after width is cut."""
    found = Held()
    for _, sparse, count in kinds.layers:
        one = _held(layer_weights(shape, sparse, tp, ep))
        found += Held(one.dense * count, one.experts * count)
    outer = outer_weights(shape, tp)
    if kinds.first:
        found += _held(outer["embedding"])
    if kinds.last:
        found += _held(outer["norm"]) + _held(outer["head"])
        if not outer["head"] and not kinds.first:  # tied: the last stage has a table of its own
            found += _held(outer["embedding"][:1])
    return found


def _held(weights: Sequence[Weight]) -> Held:
    experts = sum(w.elements for w in weights if w.expert)
    return Held(sum(w.elements for w in weights) - experts, experts)


def gradients(
    ways: Ways, layout: Layout, software: Software, holding: Held,
    ahead: float, back: float, element: int,
) -> Traffic:  # fmt: skip
    """Sums once a step, beside the last micro-batch's backward of `back` seconds; parameters after the
    update, beside the next step's first forward of `ahead`.
    """
    if is_sharded(layout):
        return Traffic()
    reduced = gathered = 0.0
    for elements, shards in ways.pairs(holding):
        if not elements:
            continue
        size = float(elements) * software.gradient_bytes
        if shards.ranks == 1:
            reduced += ways.copies.reduce(size)
            continue
        reduced += shards.scatter(size) + ways.copies.reduce(size / shards.ranks)
        gathered += shards.gather(float(elements) * element)
    hidden = min(software.overlap * reduced, back)
    hidden += min(software.overlap_parameters * gathered, ahead)
    return Traffic(reduced + gathered - hidden + slowed(hidden), hidden)


def sharded(
    ways: Ways, layout: Layout, software: Software, holding: Held,
    forward: float, backward: float, element: int,
) -> Traffic:  # fmt: skip
    """ZeRO-3 of one part and micro-batch: gathered twice, scattered once, beside its passes."""
    if not is_sharded(layout):
        return Traffic()
    gathered = reduced = 0.0
    for elements, shards in ways.pairs(holding):
        if elements:
            size = float(elements) * software.gradient_bytes
            gathered += shards.gather(float(elements) * element)
            reduced += shards.scatter(size) + ways.copies.reduce(size / shards.ranks)
    ahead = min(software.overlap * gathered, forward)
    back = min(software.overlap * (gathered + reduced), backward)
    hidden = ahead + back
    return Traffic(2 * gathered + reduced - hidden + slowed(hidden), hidden)
