"""Bytes of parameters, masters, gradients and optimizer state on one rank, by ZeRO stage.

Rajbhandari et al. 2020: 1 divides the optimizer's state, 2 also gradients, 3 also parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.layout import Layout
from fivefold.plan.memory.parameters import Weight
from fivefold.plan.memory.place import WIDE
from fivefold.plan.workload import Software, Training


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


def expert_shards(layout: Layout) -> int:
    """Ranks that divide the state of the same experts."""
    return layout.dp_shard * layout.cp * layout.tp // layout.ep


def states(
    weights: Sequence[Weight],
    training: Training,
    layout: Layout,
    software: Software,
    element: int,
) -> States:
    """Of the parameters that the first rank holds after width and depth are cut."""
    moments = {"adamw": 2, "sgd": 1}[training.optimizer] * WIDE
    whole, shared = sum(w.elements for w in weights), _shared(weights, layout, software)
    if is_sharded(layout):
        found = _fully(shared, software, element, moments)
    else:
        grads = shared if layout.zero == 2 and layout.shards > 1 else whole
        masters = 0 if element >= WIDE else WIDE * shared
        kept = software.gradient_bytes if element < WIDE else element
        found = States(element * whole, masters, kept * grads, moments * shared)
    return _offloaded(found, layout, shared)


def _shared(weights: Sequence[Weight], layout: Layout, software: Software) -> int:
    """Elements of this rank's share."""
    ranks = {False: layout.shards, True: expert_shards(layout)}
    if not software.flat_shards:
        return sum(w.shard(ranks[w.expert]) for w in weights)
    return sum(
        -(-sum(w.elements for w in weights if w.expert is expert) // ranks[expert])
        for expert in (False, True)
    )


def _fully(shared: int, software: Software, element: int, moments: int) -> States:
    if software.flat_shards and element < WIDE:
        kept = software.gradient_bytes
        return States(element * shared, WIDE * shared, kept * shared, moments * shared)
    return States(WIDE * shared, 0, WIDE * shared, moments * shared)


def _offloaded(found: States, layout: Layout, shared: int) -> States:
    """`optimizer`: masters, moments, and the gradients they are updated from are on the host."""
    if layout.offload == "none":
        return found
    masters = found.masters or WIDE * shared
    host = masters + found.optimizer + WIDE * shared
    if layout.offload == "optimizer":
        return States(found.parameters, 0, found.gradients, 0, host)
    return States(0, 0, 0, 0, host)
