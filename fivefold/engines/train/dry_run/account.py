"""What one rank holds and moves in a training step, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Of what a ring of n ranks makes each send, per byte of the payload (Thakur et al. 2005).
RING = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclass(frozen=True)
class Memory:
    """Bytes. Each storage counts once, for the first name that it has here.

    masters: those that are not the parameters themselves. gradients: held when all are reduced.
    activations: the most of everything else at one time: what backward needs, gathered
    parameters, communication buffers, temporaries. peak: the most of all together.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one group, in a step.

    bytes: of their whole tensors, added up: of an all-gather the result, of the others what this
    rank hands in (or, for `recv`, takes).
    """

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that leave this rank if the collective is a ring."""
        if self.kind == "recv":
            return 0.0
        if self.kind not in RING:
            return float(self.bytes)
        return RING[self.kind] * self.bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Account:
    """One rank's step."""

    rank: int
    coordinates: dict[str, int]
    memory: Memory
    collectives: tuple[Collective, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rank": self.rank,
            "coordinates": self.coordinates,
            "bytes": asdict(self.memory),
            "collectives": [{**asdict(c), "sent": c.sent} for c in self.collectives],
        }
