"""`x @ weight.T + bias`, in the number format of its inputs.

Where a CPU has no bf16/fp16 matrix instructions, torch's low-precision GEMMs are scalar loops (a
hundredth of the fp32 rate on AVX2). There, everything but a few rows is computed through fp32
copies of the operands and rounded once, which is also the more accurate result. A few rows stay
in the low format: they are bound by reading the weight, and half the bytes are half the time.
"""

from __future__ import annotations

# N rows, I inputs, O outputs
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.dispatch import low_precision_gemm_is_native
from fivefold.kernels.split_linear import is_split, split_linear

MEMORY_BOUND_ROWS = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] times [O, I] transposed, plus [O]: [..., O] in x's dtype."""
    graded = torch.is_grad_enabled()
    if not graded and is_split(x, weight):
        return split_linear(x, weight, bias)
    if low_precision_gemm_is_native(x.device.type, x.dtype):
        return F.linear(x, weight, bias)
    if graded:
        return _UpcastLinear.apply(x, weight, bias)
    if x.numel() <= MEMORY_BOUND_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return _UpcastLinear.forward(x, weight, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same through fp64, rounded once."""
    wide = x.double() @ weight.double().mT
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


class _UpcastLinear(torch.autograd.Function):
    """GEMMs in fp32; what is saved for backward stays in the low format."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        rows = grad.flatten(0, -2)
        grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.mT @ x.flatten(0, -2).float()).to(weight.dtype)
        grad_bias = rows.sum(0).to(weight.dtype) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias
