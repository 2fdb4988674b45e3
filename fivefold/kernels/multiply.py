"""`a @ b + bias` where torch's own product is slow, or depends on what else is multiplied beside.

BLAS libraries choose kernels by shape, so the same row can give other bits in another batch. The
native and Triton products sum every element in one fixed order. Where neither is here, rows go
through torch in blocks of one fixed size, which asks the BLAS for the same shape every time.
"""

from __future__ import annotations

# M rows, N columns, K what is summed over
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.gemm import gemm
from fivefold.kernels.operator import count_as_product, define, differentiate

# Rows that a block of the fallback has, padded with zeros: few, since one token pays for them all.
BLOCK_ROWS = 16


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M,K] by [K,N], plus [N]: [M,N] in a's format, summed in fp32 and rounded once."""
    return MULTIPLY(a, b, bias)


def multiply_reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same through fp64, rounded once."""
    wide = a.double() @ b.double()
    return (wide if bias is None else wide + bias.double()).to(a.dtype)


def _compute(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    match dispatch.choose("linear", a.device.type, a.dtype).implementation:
        case "native":
            return gemm(a, b, bias=bias)
        case "triton":
            from fivefold.kernels.triton.matmul import matmul  # imports Triton

            return matmul(a, b, bias)
    if dispatch.is_deterministic():
        return multiply_in_blocks(a, b, bias)
    return multiply_through_fp32(a, b, bias)


def multiply_through_fp32(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Fp32 copies for CPUs whose low-precision products are scalar loops (1% of the rate)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    product = a.to(wide) @ b.to(wide)
    return (product if bias is None else product.add_(bias.to(wide))).to(a.dtype)


def multiply_in_blocks(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for BLOCK_ROWS rows at a time, so that no row depends on how many there are."""
    rows = a.shape[0]
    padded = F.pad(a, (0, 0, 0, -rows % BLOCK_ROWS))
    blocks = [multiply_through_fp32(block, b, bias) for block in padded.split(BLOCK_ROWS)]
    return torch.cat(blocks)[:rows] if blocks else a.new_empty(0, b.shape[1])


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias = inputs
    ctx.save_for_backward(a, b)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad_a = multiply(grad, b.mT) if ctx.needs_input_grad[0] else None
    grad_b = multiply(a.mT, grad) if ctx.needs_input_grad[1] else None
    grad_bias = None
    if ctx.has_bias and ctx.needs_input_grad[2]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_bias = grad.sum(0, dtype=wide).to(grad.dtype)
    return grad_a, grad_b, grad_bias


MULTIPLY = define("multiply(Tensor a, Tensor b, Tensor? bias) -> Tensor", _compute, _shape)
differentiate("multiply", _backward, _save)
count_as_product("multiply")
