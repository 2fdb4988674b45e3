"""Tokens to their experts and back, where all experts are at hand.

The seam for expert parallelism: a mixture of experts knows its dispatcher by the protocol alone,
and `axes/ep` puts another in its place.
"""

from __future__ import annotations

# N tokens, D hidden, K experts a token, X experts, M = N K rows less dropped ones
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

DROPPED = -1  # in place of an expert's number: nobody takes the token
RunExperts = Callable[[Tensor, Tensor], Tensor]


class ExpertDispatcher(Protocol):
    """Runs experts over the tokens that chose them, and adds up what they say."""

    def __call__(
        self,
        hidden: Tensor,
        choice: Tensor,
        weight: Tensor,
        run: RunExperts,
        *,
        dropless: bool = True,
    ) -> Tensor:
        """[N,D] to [N,D]: for each token the sum over its experts of weight times answer.

        `choice` [N,K]: int64 numbers of experts, counted over all ranks; `weight` [N,K]. `run`
        takes rows [M,D] in the order of the experts held here and the number of rows of each
        (int64), and gives [M,D]. Where not `dropless`, `choice` may be DROPPED.
        """
        ...


class LocalDispatch:
    """All `experts` are here."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def __call__(
        self,
        hidden: Tensor,
        choice: Tensor,
        weight: Tensor,
        run: RunExperts,
        *,
        dropless: bool = True,
    ) -> Tensor:
        """See ExpertDispatcher."""
        order, counts = by_expert(choice, self.experts)
        if not dropless:
            order = order[: int(counts.sum())]
        return combine(run(spread(hidden, order, choice.shape[1]), counts), order, weight)


def by_expert(choice: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [N K], counts [X]): the flat choices sorted by expert, in each expert by token.

    Dropped choices come last, and are not counted.
    """
    flat = choice.flatten()
    flat = flat.where(flat != DROPPED, experts)
    chosen, order = flat.sort(stable=True)
    numbers = torch.arange(experts, device=choice.device)
    ends = torch.searchsorted(chosen, numbers, right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def spread(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Rows [M,D] of x [N,D], each of which has `copies` flat places, at the places in `order`.

    Its gradient is added up without atomic operations, so that it is the same every time.
    """
    return _Spread.apply(x, order, copies)


def combine(rows: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """The opposite of `spread`: [M,D] back to [N,D], weighted by `weight` [N,K] and summed."""
    places = rows.new_zeros(weight.numel(), rows.shape[1]).index_copy(0, order, rows)
    places = places.unflatten(0, weight.shape).to(weight.dtype)
    return (places * weight.unsqueeze(-1)).sum(1).to(rows.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, order: Tensor, copies: int) -> Tensor:
        return x.index_select(0, order // copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, order, ctx.copies = inputs
        ctx.tokens = x.shape[0]
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        grad = grads[0]
        places = grad.new_zeros(ctx.tokens * ctx.copies, grad.shape[1])
        places.index_copy_(0, order, grad)
        return places.unflatten(0, (ctx.tokens, ctx.copies)).sum(1), None, None
