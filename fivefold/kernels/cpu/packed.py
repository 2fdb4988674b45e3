"""Binding of packed.cpp: linear layers whose weights were repacked once, in order of reading."""

from __future__ import annotations

# M rows, O outputs, I inputs
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import FORMATS, KernelError, code, function, pointer

SIGNATURE = (
    *(c_long,) * 3, c_int, c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_int,
)  # fmt: skip
PACK_SIGNATURE = (c_long, c_long, c_int, c_int, c_void_p, c_long, c_void_p)


def pack(weight: Tensor) -> Tensor:
    """[O,I] with inputs in one piece, of 1, 2 or 4 bytes each, as panels: one flat tensor."""
    outputs, inputs = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    size = function("fivefold_packed_size", c_long, c_long)
    size.restype = c_long
    packed = weight.new_empty(size(outputs, inputs))
    pack_into = function("fivefold_pack", *PACK_SIGNATURE)
    status = pack_into(
        outputs, inputs, weight.itemsize, FORMATS.get(weight.dtype, -1), pointer(weight),
        weight.stride(0), pointer(packed),
    )  # fmt: skip
    if status:
        raise KernelError(f"weights of {weight.dtype} cannot be packed")
    return packed


def packed_linear(
    x: Tensor, packed: Tensor, outputs: int, scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x [M,I] by the packed [O,I]: [M,O] in x's format; int8 weights come with `scale` [O] fp32."""
    inputs = x.shape[1]
    if packed.dtype != (torch.int8 if scale is not None else x.dtype):
        raise KernelError(f"x is {x.dtype}, the packed weight {packed.dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(x.shape[0], outputs)
    status = function("fivefold_packed_linear", *SIGNATURE)(
        x.shape[0], outputs, inputs, code(x), pointer(x), x.stride(0), pointer(packed),
        pointer(scale), pointer(bias), pointer(y), outputs, torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise KernelError(f"no memory to multiply {x.shape[0]} rows of {inputs} by {outputs}")
    return y
