"""Linear layers of inference: weights repacked once, in the format of the model or in int8.

Reading weights bounds the decoding of a few tokens. Packed, they are read in one forward sweep;
in int8, with one scale an output channel (as `torch._weight_int8pack_mm` has it), half as many
bytes of bf16 are. Activations stay in their format and sums are fp32.
"""

from __future__ import annotations

# M rows, O outputs, I inputs
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu import packed as native
from fivefold.kernels.multiply import multiply

INT8_LARGEST = 127


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [O,I] in the order in which a kernel reads it. `scale` [O] fp32 for int8."""

    data: Tensor
    shape: tuple[int, int]
    scale: Tensor | None
    is_native: bool

    @property
    def nbytes(self) -> int:
        """Bytes that are read for one token."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack [O,I] in its own format."""
    return _pack(weight, None, weight.dtype)


def pack_int8(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Round [O,I] to int8, one scale an output, for activations of `dtype`."""
    values, scale = quantize_int8(weight)
    return _pack(values, scale, dtype)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O,I] int8 and [O] fp32 with weight ~ int8 * scale; rows of zeros stay zeros."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1) / INT8_LARGEST
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    return (wide / divisor).round_().to(torch.int8), scale


def _pack(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> PackedWeight:
    outputs, inputs = weight.shape
    device = weight.device.type
    is_native = dispatch.choose("packed_linear", device, dtype).implementation == "native"
    data = native.pack(weight.detach()) if is_native else weight.detach()
    return PackedWeight(data, (outputs, inputs), scale, is_native)


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M,I] times the packed [O,I] transposed, plus bias [O] fp32: [M,O] in x's dtype."""
    if packed.is_native:
        return native.packed_linear(x, packed.data, packed.shape[0], packed.scale, bias)
    choice = dispatch.choose("packed_linear", x.device.type, x.dtype)
    if packed.scale is not None and choice.implementation == "triton":
        from fivefold.kernels.triton.int8_linear import int8_linear  # imports Triton

        return int8_linear(x, packed.data, packed.scale, bias)
    return packed_linear_reference(x, packed, bias)


def packed_linear_reference(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The same by plain torch, for weights that were not packed by a kernel."""
    if packed.scale is None:
        return multiply(x, packed.data.mT, bias)
    wide = (x.float() @ packed.data.float().mT) * packed.scale
    return (wide if bias is None else wide + bias).to(x.dtype)
