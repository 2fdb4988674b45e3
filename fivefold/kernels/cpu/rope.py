"""Binding of rope.cpp."""

from __future__ import annotations

# B batch, S sequence, H heads, E head_dim, F = E/2 frequencies
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError, code, function, pointer

SIGNATURE = (
    c_int, c_long, c_long, c_long, c_long, c_void_p, c_long, c_long, c_long, c_void_p, c_void_p,
    c_long, c_float, c_void_p, c_int,
)  # fmt: skip


def check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise `KernelError` unless x is [B,S,H,E] and the tables [B or 1,S,E/2]."""
    if x.ndim != 4 or x.shape[-1] % 2:
        raise KernelError(f"rope turns [B,S,H,E] with an even E, not {list(x.shape)}")
    expected = (x.shape[1], x.shape[-1] // 2)
    fits = cos.ndim == 3 and cos.shape[1:] == expected and cos.shape[0] in (1, x.shape[0])
    if not fits or cos.shape != sin.shape:
        raise KernelError(
            f"rope of {list(x.shape)} has no tables {list(cos.shape)} and {list(sin.shape)}"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [B,S,H,E], heads anywhere, by the angles of tables [B or 1,S,F], or `back` by them."""
    batch, length, heads, head_dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = (t.float().contiguous() for t in (cos, sin))
    table_batch = 0 if cos.shape[0] == 1 else cos.stride(0)
    y = x.new_empty(x.shape)
    function("fivefold_rotate", *SIGNATURE)(
        code(x), batch, length, heads, head_dim // 2, pointer(x), *x.stride()[:3], pointer(cos),
        pointer(sin), table_batch, -1.0 if back else 1.0, pointer(y), torch.get_num_threads(),
    )  # fmt: skip
    return y
