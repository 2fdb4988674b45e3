"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.2 and figure 2).

1F1B whose backward is split: the gradient of the input goes on at once, that of the weights fills
what would be bubble. Rank r postpones the weights by r micro-batches, so that every rank keeps the
activations of p micro-batches, as the first rank of 1F1B does. The bubble is (p - 1)(F + I - W): with
equal times a third of 1F1B's.
"""

from __future__ import annotations

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, straight


def build(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank."""
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zb-h1", ranks, ranks, microbatches, straight(ranks), orders)


def _order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    order = Order({rank: range(microbatches)})
    warm = min(ranks - 1 - rank, microbatches)
    for k in range(microbatches + warm):
        if k < microbatches:
            order.forward(rank)
        if k >= warm:
            order.for_input(rank)
            if order.owed > rank:
                order.for_weights()
    while order.owed:
        order.for_weights()
    return tuple(order.actions)
