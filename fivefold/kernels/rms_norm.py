"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

# D normalised dimension
from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dim; [..., D] in x's dtype.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once. Gemma uses `offset` 1.
    """
    if not torch.is_grad_enabled():
        # Entering an autograd function costs several times the arithmetic of a single token.
        return _RMSNorm.forward(x, weight, eps, offset)[0]
    return _RMSNorm.apply(x, weight, eps, offset)[0]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The same by ordinary differentiable operators."""
    wide = _wide(x)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (weight.to(wide.dtype) + offset)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one scalar a row for backward, where autograd would keep three copies of x."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        wide = _wide(x)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = (wide * inverse).mul_(weight.to(wide.dtype) + offset).to(x.dtype)
        return y, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.offset = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normal = _wide(x) * inverse
        grad = _wide(grad)
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * (weight.to(grad.dtype) + ctx.offset)
        mean = (scaled * normal).mean(-1, keepdim=True)
        grad_x = normal.mul_(mean).neg_().add_(scaled).mul_(inverse).to(x.dtype)
        return grad_x, grad_weight, None, None
