"""Many matrices, each times its own rows: what a mixture of experts computes.

torch's grouped product is used where it covers the operands, and a loop over matrices elsewhere.
Both are behind operators of their own, because the shapes of results do not depend on the counts:
the compiler and fake tensors then need not know them (torch's own operator lets fakes of bf16
alone pass, and its backward fails on gradients whose rows do not lie in order, a sum's for one).
"""

from __future__ import annotations

# M rows, I inputs, O outputs, X matrices
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.dispatch import low_precision_gemm_is_native

# torch asks that rows of both operands start at multiples of so many bytes.
ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M,I] times [X,O,I] transposed to [M,O]: the first counts[0] rows by weight[0], and so on.

    `counts` [X] int64 adds up to M; a matrix may have no rows.
    """
    return _GroupedLinear.apply(x, weight, counts)


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product covers these operands, in backward as in forward."""
    if x.shape[0] == 0 or not low_precision_gemm_is_native(x.device.type, x.dtype):
        return False
    if x.device.type != "cpu" and x.dtype != torch.bfloat16:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.dtype != weight.dtype:
        return False
    rows = (x.shape[1], weight.shape[1], weight.shape[2])
    return all(size * x.itemsize % ALIGNMENT == 0 for size in rows)


def multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows [M,I] by matrices [X,O,I]: [M,O]."""
    if is_grouped(x, weight):
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    return multiply_by_loop(x, weight, counts)


def multiply_by_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, matrix by matrix. Needs `counts` on the host."""
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([_product(rows, matrix.mT) for rows, matrix in parts])


def outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Rows [M,O] and [M,I] to the sum of their outer products for each matrix: [X,O,I]."""
    if is_grouped(x, grad.unsqueeze(0)):
        return F.grouped_mm(grad.mT, x, offs=counts.cumsum(0, dtype=torch.int32))
    return outer_by_loop(grad, x, counts)


def outer_by_loop(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The same, matrix by matrix. Needs `counts` on the host."""
    sizes = counts.tolist()
    parts = zip(grad.split(sizes), x.split(sizes), strict=True)
    return torch.stack([_product(slopes.mT, rows) for slopes, rows in parts])


def _product(a: Tensor, b: Tensor) -> Tensor:
    if low_precision_gemm_is_native(a.device.type, a.dtype):
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


_library = torch.library.Library("fivefold", "FRAGMENT")
for _name, _function in (("grouped_multiply", multiply), ("grouped_outer", outer)):
    _library.define(f"{_name}(Tensor rows, Tensor other, Tensor counts) -> Tensor")
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("fivefold::grouped_multiply")
def _multiply_shape(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("fivefold::grouped_outer")
def _outer_shape(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return torch.ops.fivefold.grouped_multiply(x.contiguous(), weight.contiguous(), counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad, grad_x, grad_weight = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            turned = weight.contiguous().mT
            grad_x = torch.ops.fivefold.grouped_multiply(grad, turned, counts)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.ops.fivefold.grouped_outer(grad, x.contiguous(), counts)
        return grad_x, grad_weight, None
