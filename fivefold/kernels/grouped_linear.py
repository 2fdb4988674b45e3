"""Many matrices, each times its own rows: what a mixture of experts computes."""

from __future__ import annotations

# M rows, I inputs, O outputs, X matrices
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.dispatch import low_precision_gemm_is_native
from fivefold.kernels.linear import linear

# torch asks that rows of both operands start at multiples of so many bytes.
ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M,I] times [X,O,I] transposed to [M,O]: the first counts[0] rows by weight[0], and so on.

    `counts` [X] int64 adds up to M; a matrix may have no rows. One grouped product where torch
    has it, which reads `counts` on the device; a loop over matrices elsewhere.
    """
    if is_grouped(x, weight):
        return _GroupedLinear.apply(x, weight, counts.cumsum(0, dtype=torch.int32))
    return grouped_linear_by_loop(x, weight, counts)


def grouped_linear_by_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, matrix by matrix. Needs `counts` on the host."""
    parts = x.split(counts.tolist())
    # One `unbind` has one gradient; taking matrices one by one would add up X whole tensors.
    return torch.cat([linear(p, w) for p, w in zip(parts, weight.unbind(), strict=True)])


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product covers these operands."""
    if x.shape[0] == 0 or not low_precision_gemm_is_native(x.device.type, x.dtype):
        return False
    if x.device.type != "cpu" and x.dtype != torch.bfloat16:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.dtype != weight.dtype:
        return False
    rows = (x.shape[1], weight.shape[1], weight.shape[2])
    return all(size * x.itemsize % ALIGNMENT == 0 for size in rows)


class _GroupedLinear(torch.autograd.Function):
    """torch's own backward fails on gradients whose rows do not lie in order (a sum's, say)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x.contiguous(), weight.contiguous().mT, offs=ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad, grad_x, grad_weight = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad, weight.contiguous(), offs=ends)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.mT, x.contiguous(), offs=ends)
        return grad_x, grad_weight, None
