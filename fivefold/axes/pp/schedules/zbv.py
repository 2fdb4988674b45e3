"""ZB-V (Qi et al. 2024, arXiv 2401.10241v2 section 6; "Pipeline Parallelism with Controllable Memory").

Stages lie in a V, down the ranks and up again: the last stage is on the first rank, which so starts
its backward as soon as the first micro-batch is through. With F = I = W no rank idles between its
first and its last action, at 1F1B's memory.
"""

from __future__ import annotations

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Order, Schedule, folded


def build(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank. Fewer than 2p - 1 micro-batches leave gaps in the same order."""
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zbv", ranks, 2 * ranks, microbatches, folded(ranks), orders)


def _order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Written for enough micro-batches to fill the V; those that do not exist are left out."""
    down, up = rank, 2 * ranks - 1 - rank
    filled = max(microbatches, 2 * ranks - 1)
    order = Order({stage: range(filled) for stage in (down, up)})
    _warm_up(order, down, up, rank, ranks)
    while order.forwards(up) < filled:
        if order.forwards(down) < filled:
            order.forward(down)
        _input_and_weights(order, down)
        order.forward(up)
        _input_and_weights(order, up)
    for _ in range(rank):
        order.for_input(down)
        order.for_input(up)
    actions = _drain(order, down, ranks - rank)
    return tuple(action for action in actions if action.microbatch < microbatches)


def _warm_up(order: Order, down: int, up: int, rank: int, ranks: int) -> None:
    for _ in range(2 * (ranks - rank) - 1):
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(ranks - rank):
        order.forward(up)
        _input_and_weights(order, up)


def _input_and_weights(order: Order, stage: int) -> None:
    order.for_input(stage)
    order.for_weights()


def _drain(order: Order, down: int, left: int) -> list[Action]:
    """The first stage's last inputs, each followed by weights of its own; then the second's."""
    owed = order.take_owed()
    early = [action for action in owed if action.stage == down]
    late = [action for action in owed if action.stage != down]
    for _ in range(left):
        order.for_input(down)
        early += order.take_owed()
        order.actions.append(early.pop(0))
    return [*order.actions, *late, *early]
