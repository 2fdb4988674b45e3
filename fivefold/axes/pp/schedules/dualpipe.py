"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): micro-batches enter at both ends.

Every rank holds two stages, r and p-1-r, and so every stage exists on two ranks: twice the
parameters, whose gradients are summed over the two copies. Either half of the pipeline then runs as
a V of half its depth (DualPipeV), one direction filling what the other leaves idle. The bubble is
(p/2 - 1)(F&B + B - 3W), F&B a forward and backward side by side; p + 1 micro-batches are in flight.
"""

from __future__ import annotations

from fivefold.axes.pp.schedule import Order, Schedule, folded
from fivefold.axes.pp.schedules.dualpipe_v import fill
from fivefold.core.errors import LayoutError


def build(ranks: int, microbatches: int) -> Schedule:
    """Raises LayoutError for odd numbers and for fewer than 2 ranks' worth of micro-batches."""
    if ranks % 2:
        raise LayoutError(
            f"dualpipe needs an even number of ranks, not {ranks}",
            f"use pp={ranks + 1}, or the schedule dualpipe-v",
        )
    if microbatches % 2 or microbatches < 2 * ranks:
        least = max(2 * ranks, microbatches + microbatches % 2)
        raise LayoutError(
            f"dualpipe on {ranks} ranks needs an even number of at least {2 * ranks} "
            f"micro-batches, not {microbatches}",
            f"use {least}, or the schedule 1f1b",
        )
    orders = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        order = Order({down: range(0, microbatches, 2), up: range(1, microbatches, 2)})
        near = (down, up) if rank < ranks // 2 else (up, down)
        depth = min(rank, ranks - 1 - rank)
        fill(order, near, depth, ranks // 2, microbatches // 2)
        orders.append(tuple(order.actions))
    placement = folded(ranks)
    return Schedule("dualpipe", ranks, ranks, microbatches, placement, tuple(orders), directions=2)
