"""DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe): DualPipe folded at the middle.

A V as in ZB-V, two stages a rank; in the steady state a forward of one stage stands beside a whole
backward of the other, so that an implementation may overlap the communication inside one with the
computation of the other. Here the two run one after the other.
"""

from __future__ import annotations

from fivefold.axes.pp.schedule import Order, Schedule, folded
from fivefold.core.errors import LayoutError


def build(ranks: int, microbatches: int) -> Schedule:
    """Raises LayoutError for fewer than 2 ranks' worth of micro-batches."""
    if microbatches < 2 * ranks:
        raise LayoutError(
            f"dualpipe-v on {ranks} ranks needs at least {2 * ranks} micro-batches, "
            f"not {microbatches}",
            f"use {2 * ranks} or more, or the schedule 1f1b",
        )
    orders = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        order = Order({down: range(microbatches), up: range(microbatches)})
        fill(order, (down, up), rank, ranks, microbatches)
        orders.append(tuple(order.actions))
    return Schedule("dualpipe-v", ranks, 2 * ranks, microbatches, folded(ranks), tuple(orders))


def fill(order: Order, stages: tuple[int, int], rank: int, ranks: int, microbatches: int) -> None:
    """The eight phases of the DualPipe code, for a rank at depth `rank` of `ranks`.

    `stages` are the one whose micro-batches reach this rank first, and the other; each passes
    `microbatches` micro-batches.
    """
    first, second = stages
    below = ranks - 1 - rank  # ranks deeper in the V
    for _ in range(2 * below):
        order.forward(first)
    for _ in range(rank + 1):
        order.forward(first)
        order.forward(second)
    for _ in range(below):
        order.for_input(second)
        order.for_weights()
        order.forward(second)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        order.forward(first)
        order.backward(second)
        order.forward(second)
        order.backward(first)
    for _ in range(below):
        order.backward(second)
        order.forward(second)
        order.backward(first)
    _drain(order, stages, rank, below)


def _drain(order: Order, stages: tuple[int, int], rank: int, below: int) -> None:
    """Backwards of both stages, from the middle on with weights postponed, and those weights."""
    first, second = stages
    alternating = [second, first] * (rank + 1)
    whole = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    for place, stage in enumerate(alternating):
        if place < whole:
            order.backward(stage)
        else:
            order.for_input(stage)
    for _ in range(below):
        order.for_weights()
        order.for_input(first)
    while order.owed:
        order.for_weights()
