"""How long a pipeline takes, in closed form, with stages that need not cost the same.

p ranks, m micro-batches; of part s: F forward, I and W the backward for input and weights (I with
what is computed again), B = I + W; T the sum of a rank's parts, over all micro-batches the dearest
rank's. With equal parts and passes these are the formulae of docs/axes/pipeline.md, and exact (`zbv` was made for
F = I = W; with others it is what simulations of it give). With unequal parts the dearest rank sets the
pace, and filling and draining pass through all others: exact for `gpipe`, within 2 % of a simulation for
`1f1b`, and within some percent for the rest.

    1f1b          the most over s of  m (F+B) of s + sum(F+B) before s + what s waits for those after it
    gpipe         m max F + sum F - max F, and the same of B
    interleaved   m T + (p-1) mean(F+B) of one part
    zb-h1         m T + (p-1) mean(F+I-W)
    zbv           m T + (p-1) mean max(F, I, 2(I-W)) of one part
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
        return _one_f_one_b(parts, m)
    count = len(parts)
    if layout.schedule == "interleaved":
        return work + (p - 1) * sum(s.total for s in parts) / count
    early = sum(s.early for s in parts) / count
    if layout.schedule == "zbv":
        slow = (max(s.forward, s.input, 2 * (s.input - s.weight)) for s in parts)
        return work + (p - 1) * sum(slow) / count
    return work + (p / 2 - 1 if layout.schedule == "dualpipe" else p - 1) * early


def _one_f_one_b(parts: Sequence[Part], m: int) -> float:
    """Each rank in turn as the one that is never idle but at its ends.

    It starts after a forward of all before it, and ends before their backward. With a ranks after it, it
    does up to a forwards more until its first backward is back from them, and waits for the rest of
    that trip; its last backwards have no forwards between them, and come at the pace of the
    slowest after it.
    """
    longest = before = 0.0
    for rank, part in enumerate(parts):
        after = parts[rank + 1 :]
        more = min(len(after), m - 1)
        trip = sum(each.total for each in after)
        first = max(0.0, trip - more * part.forward)
        pace = max((each.total for each in after), default=0.0)
        last = more * max(0.0, pace - part.input - part.weight)
        longest = max(longest, before + m * part.total + first + last)
        before += part.total
    return longest
