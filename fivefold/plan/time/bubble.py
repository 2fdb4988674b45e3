"""How long a pipeline takes, in closed form, with stages that need not cost the same.

p ranks, m micro-batches; of part s: F forward, I and W the backward for input and weights (I with
what is computed again), B = I + W; T the sum of a rank's parts, over all micro-batches the dearest
rank's. With equal parts these are the formulae of docs/axes/pipeline.md, and exact; with unequal ones the
dearest rank sets the pace, and filling and draining pass through all others.

    1f1b          m max(F+B) + sum(F+B) - max(F+B)
    gpipe         m max F + sum F - max F, and the same of B
    interleaved   m T + (p-1) mean(F+B) of one part
    zb-h1         m T + (p-1) mean(F+I-W)
    zbv           m T + (p-1) mean F of one part
    dualpipe      m T + (p/2-1) mean(F+I-W) of one part
    dualpipe-v    m T + (p-1) mean(F+I-W) of one part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.layout import Layout


@dataclass(frozen=True)
class Part:
    """Seconds of a part of the model for one micro-batch."""

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        """All passes."""
        return self.forward + self.input + self.weight

    @property
    def early(self) -> float:
        """What stands in the way of the others while the pipeline fills and drains."""
        return max(0.0, self.forward + self.input - self.weight)


def held(layout: Layout, count: int) -> tuple[tuple[int, ...], ...]:
    """Parts that each pipeline rank computes, of `count`."""
    p = layout.pp
    if layout.schedule in ("zbv", "dualpipe-v"):
        return tuple((rank, count - 1 - rank) for rank in range(p))
    if layout.schedule == "dualpipe":  # each for half of the micro-batches
        return tuple((rank, p - 1 - rank) for rank in range(p))
    return tuple(tuple(range(rank, count, p)) for rank in range(p))


def share(layout: Layout) -> float:
    """Of a step's micro-batches, how many pass each part that a rank holds."""
    return 0.5 if layout.schedule == "dualpipe" and layout.pp > 1 else 1.0


def busy(layout: Layout, parts: Sequence[Part], microbatches: int) -> list[float]:
    """Seconds that each rank computes in a step."""
    times = microbatches * share(layout)
    return [times * sum(parts[i].total for i in of) for of in held(layout, len(parts))]


def makespan(layout: Layout, parts: Sequence[Part], microbatches: int) -> float:
    """Seconds from the first forward to the last backward, without messages."""
    p, m = layout.pp, microbatches
    work = max(busy(layout, parts, m))
    if p == 1:
        return work
    if layout.schedule == "gpipe":
        forward, backward = [s.forward for s in parts], [s.input + s.weight for s in parts]
        return sum(sum(each) + (m - 1) * max(each) for each in (forward, backward))
    if layout.schedule == "1f1b":
        totals = [s.total for s in parts]
        return sum(totals) + (m - 1) * max(totals)
    count = len(parts)
    if layout.schedule == "interleaved":
        return work + (p - 1) * sum(s.total for s in parts) / count
    early = sum(s.early for s in parts) / count
    if layout.schedule == "zbv":
        return work + (p - 1) * sum(s.forward for s in parts) / count
    return work + (p / 2 - 1 if layout.schedule == "dualpipe" else p - 1) * early
