"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone or after a residual sum.

Backward keeps the input and one scalar a row, where autograd would keep three copies of x.
"""

from __future__ import annotations

# N rows, D normalised dimension
from typing import Any

import torch
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import rms_norm as native
from fivefold.kernels.cpu.rms_norm import check_weight
from fivefold.kernels.cpu.rows import check_alike


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dim; [..., D] in x's dtype.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once. Gemma uses `offset` 1.
    Raises `KernelError` for a weight that is not [D].
    """
    return _norm(x, weight, eps, offset)[0]


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) where total = x + residual in x's dtype; [..., D] each.

    One reading of both and one writing of each, where apart they are five passes over memory.
    """
    y, total, _ = _norm_residual(x, residual, weight, eps, offset)
    return y, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The same by ordinary differentiable operators."""
    wide = _wide(x)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (weight.to(wide.dtype) + offset)).to(x.dtype)


def rms_norm_residual_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same by ordinary differentiable operators."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    check_weight(x, weight)
    match dispatch.choose("rms_norm", x.device.type, x.dtype).implementation:
        case "native":
            y, _, inverse = native.rms_norm(x, None, weight, eps, offset)
            return y, inverse
        case "triton":
            from fivefold.kernels.triton import rms_norm as gpu

            return gpu.rms_norm(x, weight, eps, offset)
    wide = _wide(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * inverse).mul_(weight.to(wide.dtype) + offset).to(x.dtype)
    return y.contiguous(), inverse.flatten()


def _forward_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_weight(x, weight)
    match dispatch.choose("rms_norm", x.device.type, x.dtype).implementation:
        case "native":
            y, total, inverse = native.rms_norm(x, residual, weight, eps, offset)
            assert total is not None, "there is a residual"
            return y, total, inverse
        case "triton":
            from fivefold.kernels.triton import rms_norm as gpu

            return gpu.rms_norm_residual(x, residual, weight, eps, offset)
    check_alike("rms_norm", x, residual=residual)
    total = (x + residual).contiguous()
    y, inverse = _forward(total, weight, eps, offset)
    return y, total, inverse


def _backward(
    grad: Tensor, extra: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `extra` added to it, and of the weight."""
    match dispatch.choose("rms_norm", x.device.type, x.dtype).implementation:
        case "native":
            return native.rms_norm_backward(grad, extra, x, weight, inverse, offset)
        case "triton":
            from fivefold.kernels.triton import rms_norm as gpu

            grad_x, grad_weight = gpu.rms_norm_backward(grad, x, weight, inverse, offset)
            return grad_x if extra is None else grad_x + extra, grad_weight
    inverse = inverse.view(*x.shape[:-1], 1)
    normal = _wide(x) * inverse
    grad = _wide(grad)
    grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
    scaled = grad * (weight.to(grad.dtype) + offset)
    mean = (scaled * normal).mean(-1, keepdim=True)
    grad_x = normal.mul_(mean).neg_().add_(scaled).mul_(inverse)
    if extra is not None:
        grad_x += extra
    return grad_x.to(x.dtype).contiguous(), grad_weight


def _shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=wide)


def _shapes_residual(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, inverse = _shapes(x)
    return y, x.new_empty(x.shape), inverse


def _shapes_backward(
    grad: Tensor, extra: Tensor | None, x: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_norm = operator.define(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
_norm_residual = operator.define(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor weight, float eps, float offset)"
    " -> (Tensor, Tensor, Tensor)",
    _forward_residual,
    _shapes_residual,
)
_norm_backward = operator.define(
    "rms_norm_backward(Tensor grad, Tensor? extra, Tensor x, Tensor weight, Tensor inverse,"
    " float offset) -> (Tensor, Tensor)",
    _backward,
    _shapes_backward,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    return *_norm_backward(grad, None, x, weight, inverse, ctx.offset), None, None


def _keep_residual(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, _, weight, _, ctx.offset = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], weight, output[2])


def _differentiate_residual(
    ctx: Any, grad: Tensor, grad_total: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    total, weight, inverse = ctx.saved_tensors
    both, of_weight = _norm_backward(grad, grad_total, total, weight, inverse, ctx.offset)
    return both, both, of_weight, None, None


operator.differentiate("rms_norm", _differentiate, _keep)
operator.differentiate("rms_norm_residual", _differentiate_residual, _keep_residual)
