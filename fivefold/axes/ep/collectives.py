"""The all-to-all of the expert axis, with its gradient."""

from __future__ import annotations

# M rows sent, R rows received, D hidden
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """[M,D] to [R,D]: the first sent[0] rows go to rank 0 of `group`, the next to rank 1, ...

    What comes is in the order of ranks. Gradients go back the same way. Every rank must take part,
    with no rows too, in forward and in backward.
    """
    return _Exchange.apply(rows, sent, received, group)


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal parts of int64 `counts`, one for each rank of `group`; not differentiable."""
    return functional.wait_tensor(functional.all_to_all_single(counts, None, None, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = received, sent, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], *ctx.way_back), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    return functional.wait_tensor(
        functional.all_to_all_single(rows.contiguous(), received, sent, group)
    )
