"""Many matrices, each times its own rows: what a mixture of experts computes.

torch's grouped product is used where it covers the operands, Triton's on GPUs under the
deterministic policy, and a loop over matrices elsewhere. All are behind operators of their own,
because the shapes of results do not depend on the counts: the compiler and fake tensors then need
not know them (torch's own operator lets fakes of bf16 alone pass, and its backward fails on
gradients whose rows do not lie in order, a sum's for one).
"""

from __future__ import annotations

# M rows, I inputs, O outputs, X matrices
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.gemm import gemm
from fivefold.kernels.multiply import multiply
from fivefold.kernels.operator import define, differentiate

# torch asks that rows of both operands start at multiples of so many bytes.
ALIGNMENT = 16


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M,I] times [X,O,I] transposed to [M,O]: the first counts[0] rows by weight[0], and so on.

    `counts` [X] int64 adds up to M; a matrix may have no rows.
    """
    return GROUPED_MULTIPLY(x.contiguous(), weight.contiguous(), counts)


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product covers these operands, in backward as in forward."""
    if x.shape[0] == 0 or dispatch.is_deterministic():
        return False
    if not dispatch.low_precision_gemm_is_native(x.device.type, x.dtype):
        return False
    if x.device.type != "cpu" and x.dtype != torch.bfloat16:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.dtype != weight.dtype:
        return False
    rows = (x.shape[1], weight.shape[1], weight.shape[2])
    return all(size * x.itemsize % ALIGNMENT == 0 for size in rows)


def grouped_multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows [M,I] by matrices [X,O,I]: [M,O]."""
    if is_grouped(x, weight):
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
    if _implementation(x) == "triton":
        from fivefold.kernels.triton.grouped_linear import grouped_multiply as triton

        return triton(x, weight, counts)
    return multiply_by_loop(x, weight, counts)


def multiply_by_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, matrix by matrix. Needs `counts` on the host."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    sizes = counts.tolist()
    for rows, matrix, to in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        _multiply_into(to, rows, matrix.mT)
    return out


def grouped_outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Rows [M,O] and [M,I] to the sum of their outer products for each matrix: [X,O,I]."""
    if is_grouped(x, grad.unsqueeze(0)):
        return F.grouped_mm(grad.mT, x, offs=counts.cumsum(0, dtype=torch.int32))
    if _implementation(x) == "triton":
        from fivefold.kernels.triton.grouped_linear import grouped_outer as triton

        return triton(grad, x, counts)
    return outer_by_loop(grad, x, counts)


def outer_by_loop(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The same, matrix by matrix. Needs `counts` on the host."""
    sizes = counts.tolist()
    out = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for slopes, rows, to in zip(grad.split(sizes), x.split(sizes), out, strict=True):
        _multiply_into(to, slopes.mT, rows)
    return out


def _implementation(x: Tensor) -> dispatch.Implementation:
    return dispatch.choose("grouped_linear", x.device.type, x.dtype).implementation


def _multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    if _implementation(a) == "native":
        gemm(a, b, out=out)
    elif dispatch.is_deterministic() and a.dtype != torch.float64:
        out.copy_(multiply(a, b))
    elif dispatch.low_precision_gemm_is_native(a.device.type, a.dtype):
        torch.mm(a, b, out=out)
    else:
        out.copy_(a.float() @ b.float())


def _multiply_shape(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _outer_shape(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    grad, grad_x, grad_weight = grad.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = GROUPED_MULTIPLY(grad, weight.mT, counts)
    if ctx.needs_input_grad[1]:
        grad_weight = GROUPED_OUTER(grad, x, counts)
    return grad_x, grad_weight, None


SCHEMA = "(Tensor rows, Tensor other, Tensor counts) -> Tensor"
GROUPED_MULTIPLY = define(f"grouped_multiply{SCHEMA}", grouped_multiply, _multiply_shape)
GROUPED_OUTER = define(f"grouped_outer{SCHEMA}", grouped_outer, _outer_shape)
differentiate("grouped_multiply", _backward, _save)
