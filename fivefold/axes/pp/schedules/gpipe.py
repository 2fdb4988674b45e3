"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards.

The bubble is (p - 1) / (m + p - 1) of the time, and every rank keeps the activations of all m
micro-batches.
"""

from __future__ import annotations

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, straight


def build(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank; backwards in the order of the forwards."""
    orders = tuple(_order(rank, microbatches) for rank in range(ranks))
    return Schedule("gpipe", ranks, ranks, microbatches, straight(ranks), orders)


def _order(rank: int, microbatches: int) -> tuple[Action, ...]:
    order = Order({rank: range(microbatches)})
    for _ in range(microbatches):
        order.forward(rank)
    for _ in range(microbatches):
        order.backward(rank)
    return tuple(order.actions)
