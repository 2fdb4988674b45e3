"""Binding of gemm.cpp: matrix products whose every element is summed in one fixed order."""

from __future__ import annotations

# M rows, N columns, K what is summed over
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError, code, function, pointer

SIGNATURE = (
    *(c_long,) * 3, c_int, c_void_p, c_long, c_long, c_void_p, c_long, c_long,
    c_int, c_void_p, c_long, c_void_p, c_int, c_int,
)  # fmt: skip


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """a [M,K] times b [K,N], of any strides, plus `bias` [N]: into `out` [M,N], or a new one.

    Operands are of one format; `out` of the same or fp32. With `accumulate` it is added to.
    Raises `KernelError` for other shapes or formats, and where memory for packing is missing.
    """
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if b.shape[0] != k or a.dtype != b.dtype:
        raise KernelError(f"cannot multiply {list(a.shape)} {a.dtype} by {list(b.shape)} {b.dtype}")
    if out is None:
        out = a.new_empty(m, n, dtype=dtype or a.dtype)
    elif list(out.shape) != [m, n] or (n > 1 and out.stride(1) != 1):
        raise KernelError(f"the result is [{m}, {n}] with rows in one piece, not {list(out.shape)}")
    if bias is not None:
        bias = bias.float().contiguous()
    status = function("fivefold_gemm", *SIGNATURE)(
        m, n, k, code(a), pointer(a), a.stride(0), a.stride(1), pointer(b), b.stride(0),
        b.stride(1), code(out), pointer(out), out.stride(0), pointer(bias), int(accumulate),
        torch.get_num_threads(),
    )  # fmt: skip
    if status == 1:
        raise KernelError(f"no memory to pack a product of {m} x {k} by {k} x {n}")
    if status:
        raise KernelError(f"no native product of {a.dtype} into {out.dtype}")
    return out
