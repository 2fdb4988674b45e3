"""Collectives with the backward that makes a divided block equal the whole one.

Megatron's two pairs of conjugates (Shoeybi et al. 2019; Korthikanti et al. 2022 for sequences):

| forward | backward | where |
|---|---|---|
| copy | all-reduce | into a divided block |
| all-reduce | copy | out of it |
| all-gather | reduce-scatter | into it, from sequence shards |
| reduce-scatter | all-gather | out of it, to sequence shards |
"""

from __future__ import annotations

# B batch, S sequence, D hidden, T tensor-parallel ranks
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

SEQUENCE = 1  # the dim that sequence parallelism divides


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x itself; its gradient is summed over the ranks."""
    return _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums to the sum on every rank; the gradient is everybody's."""
    return _SumOut.apply(x, group)


def gather_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shards [B,S/T,D] to [B,S,D]; the gradient is summed, and each rank takes its shard."""
    return _GatherIn.apply(x, group)


def scatter_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums [B,S,D] to this rank's shard [B,S/T,D] of the sum; gradients are gathered."""
    return _ScatterOut.apply(x, group)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scatter(grads[0], ctx.group), None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grads[0], ctx.group), None


# Functional collectives: the compiler traces them, where it stops at torch.distributed's own.
def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.wait_tensor(functional.all_gather_single(x.contiguous(), SEQUENCE, group))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.wait_tensor(
        functional.reduce_scatter_single(x.contiguous(), "sum", SEQUENCE, group)
    )
