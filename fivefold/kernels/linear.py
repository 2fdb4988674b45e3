"""`x @ weight.T + bias`, in the number format of its inputs.

Where torch's BLAS has a fast product of the format it is taken, else `multiply`'s. In inference a
few rows in a low format without matrix instructions stay with torch as well: they are bound by
reading the weight, which `multiply` would read twice to pack it.
"""

from __future__ import annotations

# N rows, I inputs, O outputs
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.multiply import multiply, multiply_reference
from fivefold.kernels.split_linear import is_split, split_linear

MEMORY_BOUND_ROWS = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] times [O, I] transposed, plus [O]: [..., O] in x's dtype."""
    if is_blas(x):
        if not torch.is_grad_enabled() and not dispatch.is_deterministic() and is_split(x, weight):
            return split_linear(x, weight, bias)
        return F.linear(x, weight, bias)
    return multiply(x.flatten(0, -2), weight.mT, bias).unflatten(0, x.shape[:-1])


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """[..., I] from the gradient of the output [..., O] and the weight [O,I]."""
    if is_blas(grad):
        return grad @ weight
    return multiply(grad.flatten(0, -2), weight).unflatten(0, grad.shape[:-1])


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """[O,I] from the input [..., I] and the gradient of the output [..., O], in its format."""
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    return rows.mT @ inputs if is_blas(x) else multiply(rows.mT, inputs)


def bias_gradient(grad: Tensor) -> Tensor:
    """[O] from the gradient of the output [..., O]."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.flatten(0, -2).sum(0, dtype=wide).to(grad.dtype)


def is_blas(x: Tensor) -> bool:
    """Whether products with `x` on the left are torch's own."""
    device, dtype = x.device.type, x.dtype
    if dispatch.is_deterministic():
        return dtype == torch.float64
    if dispatch.choose("linear", device, dtype).implementation == "torch":
        fast = dispatch.low_precision_gemm_is_native(device, dtype)
        return fast or _is_memory_bound(x)
    return dtype != torch.float32 and _is_memory_bound(x)


def _is_memory_bound(x: Tensor) -> bool:
    return not torch.is_grad_enabled() and x.numel() <= MEMORY_BOUND_ROWS * x.shape[-1]


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same through fp64, rounded once."""
    return multiply_reference(x.flatten(0, -2), weight.mT, bias).unflatten(0, x.shape[:-1])
