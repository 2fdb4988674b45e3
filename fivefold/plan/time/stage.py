"""Seconds of every part of the model that a pipeline stage computes."""

from __future__ import annotations

# n tokens, D hidden, V vocabulary
from functools import lru_cache

from fivefold.plan.memory.place import Place
from fivefold.plan.time.block import NOTHING, Neighbours, Passes, block, exchange
from fivefold.plan.time.cost import Cost
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.work import Kinds

# Bytes that the loss reads and writes for one logit: Megatron-LM's cross entropy in fp32 (a copy,
# the maximum, a difference, exp and its sum, a division; backward a product and a copy), and one over
# chunks that stay in the cache.
LOSS = {False: (34.0, 18.0), True: (12.0, 8.0)}


@lru_cache(maxsize=8192)
def part_passes(place: Place, speed: Rates, near: Neighbours, kinds: Kinds) -> Passes:
    """Of one micro-batch through a part of the model."""
    total = NOTHING
    for window, sparse, count in kinds.layers:
        total += _block(place, speed, near, window, sparse) * count
    if kinds.first:
        total += _embedding(place, speed, near)
    if kinds.last:
        total += _head(place, speed, near)
    return _started(total, place.software.dispatch)


@lru_cache(maxsize=4096)
def _block(
    place: Place, speed: Rates, near: Neighbours, window: int | None, sparse: bool
) -> Passes:
    return block(place, speed, near, window, sparse)


def _started(passes: Passes, dispatch: float) -> Passes:
    return Passes(
        passes.forward.started(dispatch), passes.input.started(dispatch),
        passes.weight.started(dispatch), passes.again.started(dispatch),
    )  # fmt: skip


def _embedding(place: Place, speed: Rates, near: Neighbours) -> Passes:
    """Rows looked up; backward adds into a gradient as large as the table."""
    config = place.shape.config
    row = config.hidden_size * float(place.element)
    table = place.words * row
    tensor = exchange(place, near.tensor, 1) / (2 if place.tensor > 1 else 1)
    forward = Cost(elementwise=speed.pass_over(2 * place.inside * row), tensor=tensor, operators=6)
    back = Cost(
        elementwise=speed.pass_over(3 * place.inside * row + 4 * table),
        tensor=tensor if place.tensor > 1 else 0.0,
        operators=6,
    )
    return Passes(forward, back, Cost(), Cost())


def _head(place: Place, speed: Rates, near: Neighbours) -> Passes:
    """The last norm, logits n x V/tp, and the loss."""
    config, element = place.shape.config, place.element
    n, words, hidden = float(place.inside), place.words, config.hidden_size
    flops = 2.0 * n * words * hidden
    operands = element * (n * hidden + n * words + words * hidden)
    aligned = words % 8 == 0 and hidden % 8 == 0
    ahead, back = LOSS[place.software.fused_loss]
    norm = place.tokens * hidden * element
    tensor = exchange(place, near.tensor, 1) / (2 if place.tensor > 1 else 1)
    kept = place.software.gradient_bytes
    return Passes(
        Cost(
            products=speed.product(flops, operands, aligned),
            elementwise=speed.pass_over(n * words * ahead + 2 * norm, 8),
            tensor=tensor if place.tensor > 1 else 0.0,
            operators=16,
        ),
        Cost(
            products=speed.product(flops, operands, aligned),
            elementwise=speed.pass_over(n * words * back + 4 * norm, 6),
            tensor=tensor,
            operators=16,
        ),
        Cost(
            products=speed.product(flops, operands + 2 * kept * words * hidden, aligned),
            operators=2,
        ),
        Cost(),
    )
