"""RMSNorm with the family's epsilon and weight offset."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.kernels.normed_linear import Recipe, carry
from fivefold.kernels.rms_norm import rms_norm
from fivefold.model.config import ModelConfig


class RMSNorm(nn.Module):
    """Normalises the last dim, of `size` (default: hidden); `eps` in place of the family's."""

    def __init__(
        self, config: ModelConfig, size: int | None = None, eps: float | None = None
    ) -> None:
        super().__init__()
        self.eps = config.norm_eps if eps is None else eps
        self.offset = config.norm_offset
        self.weight = nn.Parameter(torch.full((size or config.hidden_size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        normed = rms_norm(x, self.weight, self.eps, self.offset)
        # A compiler chooses itself what to keep.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return normed
        return carry(normed, Recipe(x, self.weight, self.eps, self.offset))
