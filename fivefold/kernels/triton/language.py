"""Where Triton is imported, and what every launch checks of its tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError, MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingExtraError("triton", "gpu", "an operator on a GPU") from None

__all__ = ["PRECISION", "aligned", "check", "on_device_of", "rows_of", "tl", "triton"]

# Of products of fp32 matrices: three TF32 products on tensor cores, which together keep 21 bits or
# more of fp32's 24. One TF32 product keeps 11. Plain fp32 ones fill the registers of four such tiles.
PRECISION = tl.constexpr("tf32x3")
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: one load instruction of a thread


def check(operator: str, *tensors: Tensor) -> None:
    """Floating tensors of one device that the kernels can read; raises FivefoldError otherwise."""
    for x in tensors:
        if x.dtype not in FORMATS:
            raise FivefoldError(
                f"{operator} on GPUs takes fp32, bf16 and fp16, not {x.dtype}",
                "convert it, or call the operator's reference, which takes any format",
            )
        if x.device != tensors[0].device:
            raise FivefoldError(
                f"{operator} got tensors on {tensors[0].device} and on {x.device}",
                "move them to one device",
            )
    if tensors[0].device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise FivefoldError(
            f"{operator} in Triton needs a GPU, and its tensors are on {tensors[0].device}",
            "move them to one, or call the operator from fivefold.kernels, which chooses",
        )


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def aligned(x: Tensor) -> Tensor:
    """`x`, copied if its last dim is not dense or it starts off a 16-byte boundary.

    The compiler reads aligned rows in wider pieces, and with them the order of a row's sum changes:
    a row would have other bits where it happens to start elsewhere.
    """
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    if dense and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_of(x: Tensor) -> Tensor:
    """[..., D] as [N, D], a view where strides allow one (halves of a packed tensor do)."""
    return aligned(x.reshape(-1, x.shape[-1]))
