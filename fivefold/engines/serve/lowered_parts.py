"""The two operators of a lowered step that are prepared once: packed products and norms."""

# B batch, I inputs, O outputs, T threads, D normalised dim

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.kernels.linear import linear
from fivefold.kernels.split_linear import is_split, parts_of
from fivefold.model.norm import RMSNorm


class LoweredLinear:
    """`x @ weight.T + bias + residual`, its views of the weight made beforehand.

    One row goes straight to the product that `linear` would choose for it, which takes the
    residual along as what it adds to; more rows go through `linear`.
    """

    __slots__ = ("bias", "parts", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.transposed = weight.t()
        split = is_split(weight[:1], weight)
        self.parts = parts_of(weight) if split else None  # [T,I,O/T]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B,I] and [B,O] -> [B,O]."""
        if x.shape[0] > 1:
            y = linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if self.parts is not None:
            y = self._split(x, self.parts, residual)
        elif residual is None:
            y = torch.mm(x, self.transposed)
        else:
            y = torch.addmm(residual, x, self.transposed)
        return y if self.bias is None else y.add_(self.bias)

    @staticmethod
    def _split(x: Tensor, parts: Tensor, residual: Tensor | None) -> Tensor:
        threads, _, outputs = parts.shape
        rows = x.expand(threads, 1, -1)
        if residual is None:
            return torch.bmm(rows, parts).view(1, -1)
        return torch.baddbmm(residual.view(threads, 1, outputs), rows, parts).view(1, -1)


class LoweredNorm:
    """RMSNorm with its weight ready: fp32, the family's offset added. Rounded once, at the end."""

    __slots__ = ("eps", "inverse_size", "weight")

    def __init__(self, norm: RMSNorm) -> None:
        self.weight = norm.weight.detach().float() + norm.offset
        self.eps = torch.tensor(norm.eps, device=self.weight.device)
        self.inverse_size = 1.0 / self.weight.shape[0]

    @classmethod
    def of(cls, norm: nn.Module) -> LoweredNorm | None:
        """None for an absent norm, which is an identity."""
        return cls(norm) if isinstance(norm, RMSNorm) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[...,D] to the same."""
        wide = x.float()
        # eps + norm^2 / D is the mean square in half the operators that F.rms_norm needs
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=self.inverse_size).rsqrt_()
        return (wide * scale).mul_(self.weight).to(x.dtype)
