"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

Every rank holds v stages, p apart. A stage takes a v-th of the time, so the pipeline fills and
drains v times faster: the bubble is (p - 1) / (v m + p - 1), for v times as many messages and
somewhat more activations. Micro-batches go around in rounds of p; where m is no multiple of p
the rounds are longer, as long as they are equal.
"""

from __future__ import annotations

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, looped
from fivefold.core.errors import LayoutError


def build(ranks: int, microbatches: int, virtual: int) -> Schedule:
    """Raises LayoutError where micro-batches do not divide into rounds."""
    if virtual < 2:
        raise LayoutError(
            f"the interleaved schedule with {virtual} virtual stage a rank interleaves nothing",
            "use at least 2 virtual stages, or the schedule 1f1b",
        )
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise LayoutError(
            f"{microbatches} micro-batches do not divide into {rounds} equal rounds of the "
            f"interleaved schedule on {ranks} ranks",
            f"use a multiple of {ranks}, e.g. {ranks * rounds} or {ranks * (rounds + 1)}",
        )
    size = microbatches // rounds
    orders = tuple(_order(rank, ranks, microbatches, virtual, size) for rank in range(ranks))
    placement = looped(ranks, virtual)
    return Schedule("interleaved", ranks, ranks * virtual, microbatches, placement, orders)


def _order(rank: int, ranks: int, microbatches: int, virtual: int, size: int) -> tuple[Action, ...]:
    """Forward k and backward k belong to the chunk (k // size) % virtual, counted up and down."""
    chunks = [rank + chunk * ranks for chunk in range(virtual)]
    order = Order({stage: range(microbatches) for stage in chunks})
    total = microbatches * virtual
    # The last stage's forwards of a round come after all other chunks' of that round; each rank
    # further up needs one more forward under way for the message there, and one for that back.
    warm = min((virtual - 1) * size + 2 * (ranks - 1 - rank), total)
    for k in range(total + warm):
        if k < total:
            order.forward(chunks[k // size % virtual])
        if k >= warm:
            order.backward(chunks[-1 - (k - warm) // size % virtual])
    return tuple(order.actions)
