"""Tensors as rows of one length, which is how row-wise kernels see them."""

from __future__ import annotations

# N rows, D columns
from torch import Tensor

from fivefold.kernels.cpu.library import KernelError


def rows_of(x: Tensor) -> Tensor:
    """[..., D] as [N, D] whose columns lie in one piece: a view where strides allow, else a copy."""
    size = x.shape[-1]
    rows = x.reshape(x.numel() // size if size else 0, size)
    return rows if size <= 1 or rows.stride(1) == 1 else rows.contiguous()


def check_alike(op: str, first: Tensor, **others: Tensor | None) -> None:
    """Raise `KernelError` unless the others are of the first one's shape, format and device."""
    for name, other in others.items():
        if other is None:
            continue
        if other.shape != first.shape:
            raise KernelError(f"{op}: {name} is {list(other.shape)}, not {list(first.shape)}")
        if other.dtype != first.dtype or other.device != first.device:
            raise KernelError(
                f"{op}: {name} is {other.dtype} on {other.device}, "
                f"not {first.dtype} on {first.device}"
            )
