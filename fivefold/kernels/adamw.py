"""AdamW (Loshchilov and Hutter 2019) over flat tensors, in place, in one pass over memory."""

from __future__ import annotations

# P parameters
import math

import torch
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import adamw as native
from fivefold.kernels.cpu.library import KernelError


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    copy: Tensor | None = None,
) -> None:
    """Update `parameter` and both moments, all dense fp32 of one shape, as torch.optim.AdamW does.

    `gradient` is of the same shape in any format. `step` counts updates from 1. `copy`, of the
    shape too, gets the new parameter rounded to its format (what bf16 training computes with).
    Raises `KernelError` for other shapes, strides or formats.
    """
    with torch.no_grad():
        _adamw(
            parameter, gradient, first, second, copy, lr, beta1, beta2, eps, weight_decay, step
        )  # fmt: skip


def adamw_reference_(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """The same by plain operators, as the paper's algorithm 2 writes it."""
    slope = gradient.to(parameter.dtype)
    first.lerp_(slope, 1 - beta1)
    second.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    parameter.mul_(1 - lr * weight_decay).addcdiv_(first, scale, value=-lr / (1 - beta1**step))
    if copy is not None:
        copy.copy_(parameter)


def _update(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    _check(parameter, gradient, first, second, copy, step)
    match dispatch.choose("adamw", parameter.device.type, parameter.dtype).implementation:
        case "native":
            update = native.adamw_
        case "triton":
            from fivefold.kernels.triton import adamw as gpu

            update = gpu.adamw_
        case _:
            update = adamw_reference_
    update(parameter, gradient, first, second, copy, lr, beta1, beta2, eps, weight_decay, step)


def _check(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    step: int,
) -> None:
    tensors = {
        "parameter": parameter, "gradient": gradient, "first moment": first,
        "second moment": second, "copy": copy,
    }  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != parameter.shape or not tensor.is_contiguous():
            raise KernelError(
                f"adamw_ takes dense tensors of one shape: {name} is {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}, the parameter {list(parameter.shape)}"
            )
        if tensor.device != parameter.device:
            raise KernelError(f"adamw_: {name} is on {tensor.device}, not {parameter.device}")
    for name in ("parameter", "first moment", "second moment"):
        held = tensors[name]
        assert held is not None, "only the copy may be missing"
        if held.dtype not in (torch.float32, torch.float64) or held.dtype != parameter.dtype:
            raise KernelError(f"adamw_ updates fp32 masters: {name} is {held.dtype}")
    if step < 1:
        raise KernelError(f"adamw_ counts steps from 1, not {step}")


_adamw = operator.define(
    "adamw_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) first, Tensor(c!) second,"
    " Tensor(d!)? copy, float lr, float beta1, float beta2, float eps, float weight_decay, int step)"
    " -> ()",
    _update,
    lambda *_: None,
)
