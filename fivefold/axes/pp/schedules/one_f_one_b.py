"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503 and 2104.04473).

As GPipe, but a rank runs a backward as soon as it can: rank r keeps at most p - r activations
instead of m. The bubble is the same.
"""

from __future__ import annotations

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, straight


def build(ranks: int, microbatches: int) -> Schedule:
    """Warm up with as many forwards as there are ranks after this one, then one of each."""
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("1f1b", ranks, ranks, microbatches, straight(ranks), orders)


def _order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    order = Order({rank: range(microbatches)})
    warm = min(ranks - 1 - rank, microbatches)
    for _ in range(warm):
        order.forward(rank)
    for _ in range(microbatches - warm):
        order.forward(rank)
        order.backward(rank)
    for _ in range(warm):
        order.backward(rank)
    return tuple(order.actions)
