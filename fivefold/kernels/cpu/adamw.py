"""Binding of adamw.cpp."""

from __future__ import annotations

# P parameters
import math
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import FORMATS, code, function, pointer

SIGNATURE = (
    c_long, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p, *(c_float,) * 7, c_int,
)  # fmt: skip


def adamw_(
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
    """One step in place over dense tensors of one size; `kernels.adamw` checks them."""
    function("fivefold_adamw", *SIGNATURE)(
        parameter.numel(), pointer(parameter), code(gradient), pointer(gradient), pointer(first),
        pointer(second), FORMATS[torch.float32] if copy is None else code(copy), pointer(copy),
        lr / (1 - beta1**step), math.sqrt(1 - beta2**step), 1 - lr * weight_decay, beta2, 1 - beta1,
        1 - beta2, eps, torch.get_num_threads(),
    )  # fmt: skip
