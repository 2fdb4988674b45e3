"""Binding of rms_norm.cpp."""

from __future__ import annotations

# N rows, D normalised dimension
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError, code, function, pointer
from fivefold.kernels.cpu.rows import check_alike, rows_of

FORWARD = (
    c_int, c_long, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p, c_float, c_float,
    c_void_p, c_void_p, c_void_p, c_int,
)  # fmt: skip
BACKWARD = (
    c_int, c_long, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p, c_long, c_void_p, c_float,
    c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_int,
)  # fmt: skip
# Rows of the weight's gradient that are summed one after the other: at least so many, and at most
# so many blocks of them.
LEAST_ROWS, MOST_BLOCKS = 32, 64


def check_weight(x: Tensor, weight: Tensor) -> None:
    """Raise `KernelError` unless there is a weight for each column."""
    if weight.shape != x.shape[-1:]:
        raise KernelError(f"rms_norm of {list(x.shape)} has no weight {list(weight.shape)}")


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y [...,D], x + residual if there is one, 1 / rms [N] fp32)."""
    check_alike("rms_norm", x, residual=residual)
    rows, more = rows_of(x), None if residual is None else rows_of(residual)
    y = x.new_empty(x.shape)
    total = None if residual is None else x.new_empty(x.shape)
    inverse = x.new_empty(rows.shape[0], dtype=torch.float32)
    weight = weight.float().contiguous()
    function("fivefold_rms_norm", *FORWARD)(
        code(x), rows.shape[0], rows.shape[1], pointer(rows), rows.stride(0), pointer(more),
        0 if more is None else more.stride(0), pointer(weight), eps, offset, pointer(y),
        pointer(total), pointer(inverse), torch.get_num_threads(),
    )  # fmt: skip
    return y, total, inverse


def rms_norm_backward(
    grad: Tensor, extra: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x [...,D], with `extra` added, and of the weight [D]."""
    check_alike("rms_norm_backward", x, grad=grad, extra=extra)
    rows, slopes = rows_of(x), rows_of(grad)
    more = None if extra is None else rows_of(extra)
    count, size = rows.shape
    block_rows = max(LEAST_ROWS, -(-count // MOST_BLOCKS))
    partial = inverse.new_empty(-(-count // block_rows), size)
    grad_x, grad_weight = x.new_empty(x.shape), inverse.new_empty(size)
    wide = weight.float().contiguous()
    function("fivefold_rms_norm_backward", *BACKWARD)(
        code(x), count, size, pointer(slopes), slopes.stride(0), pointer(more),
        0 if more is None else more.stride(0), pointer(rows), rows.stride(0), pointer(wide), offset,
        pointer(inverse), pointer(grad_x), block_rows, pointer(partial), pointer(grad_weight),
        torch.get_num_threads(),
    )  # fmt: skip
    return grad_x, grad_weight.to(weight.dtype)
