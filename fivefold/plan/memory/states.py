"""Bytes of parameters, masters, gradients and optimizer state on one rank, by ZeRO stage.

Rajbhandari et al. 2020: 1 divides the optimizer's state, 2 also gradients, 3 also parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.core.layout import Layout
from fivefold.plan.memory.parameters import Weight
from fivefold.plan.memory.place import WIDE
from fivefold.plan.workload import Software


@dataclass(frozen=True)
class States:
    """Bytes on the device; `host`: in the host's memory, where the layout offloads."""

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.masters + self.gradients + self.optimizer


def is_sharded(layout: Layout) -> bool:
    """Whether parameters are gathered where they compute (ZeRO-3)."""
    return layout.offload == "parameters" or (layout.shards > 1 and layout.zero == 3)


@dataclass(frozen=True)
class Gathering:
    """How many ranks divide state. everything: parameters too (ZeRO-3); gradients: those (ZeRO-2)."""

    everything: bool
    ranks: int
    expert_ranks: int
    gradients: bool = False

    @classmethod
    def of(cls, layout: Layout) -> Gathering:
        """Of a layout."""
        expert_ranks = layout.dp_shard * layout.cp * layout.tp // layout.ep
        gradients = layout.zero == 2 and layout.shards > 1
        return cls(is_sharded(layout), layout.shards, expert_ranks, gradients)

    def shard(self, weight: Weight) -> int:
        """Elements of this rank's rows."""
        return weight.shard(self.expert_ranks if weight.expert else self.ranks)

    def bytes(self, weights: tuple[Weight, ...], expert: bool, element: int) -> int:
        """Of a unit once it is gathered, padded rows among them; 0 where nothing is."""
        if not self.everything:
            return 0
        ranks = self.expert_ranks if expert else self.ranks
        return element * sum(w.shard(ranks) * ranks for w in weights if w.expert is expert)


def states(
    weights: Sequence[Weight],
    gathering: Gathering,
    software: Software,
    element: int,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    offload: Literal["none", "optimizer", "parameters"] = "none",
) -> States:
    """Of the parameters that the first rank holds after width and depth are cut."""
    moments = {"adamw": 2, "sgd": 1}[optimizer] * WIDE
    whole, shared = sum(w.elements for w in weights), _shared(weights, gathering, software)
    if gathering.everything:
        found = _fully(shared, software, element, moments)
    else:
        grads = shared if gathering.gradients else whole
        masters = 0 if element >= WIDE else WIDE * shared
        kept = software.gradient_bytes if element < WIDE else element
        found = States(element * whole, masters, kept * grads, moments * shared)
    return _offloaded(found, offload, shared)


def _shared(weights: Sequence[Weight], gathering: Gathering, software: Software) -> int:
    """Elements of this rank's share."""
    if not software.flat_shards:
        return sum(map(gathering.shard, weights))
    ranks = {False: gathering.ranks, True: gathering.expert_ranks}
    return sum(
        -(-sum(w.elements for w in weights if w.expert is expert) // ranks[expert])
        for expert in (False, True)
    )


def _fully(shared: int, software: Software, element: int, moments: int) -> States:
    if software.flat_shards and element < WIDE:
        kept = software.gradient_bytes
        return States(element * shared, WIDE * shared, kept * shared, moments * shared)
    return States(WIDE * shared, 0, WIDE * shared, moments * shared)


def _offloaded(
    found: States, offload: Literal["none", "optimizer", "parameters"], shared: int
) -> States:
    """`optimizer`: masters, moments, and the gradients they are updated from are on the host."""
    if offload == "none":
        return found
    masters = found.masters or WIDE * shared
    host = masters + found.optimizer + WIDE * shared
    if offload == "optimizer":
        return States(found.parameters, 0, found.gradients, 0, host)
    return States(0, 0, 0, 0, host)
