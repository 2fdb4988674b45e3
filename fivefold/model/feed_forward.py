"""The gated feed-forward of every family here."""

from __future__ import annotations

# B batch, S sequence, D hidden, F feed-forward
from torch import Tensor, nn

from fivefold.model.config import ModelConfig
from fivefold.model.projection import Projection


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), with an inner width of `size` (the config's)."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        self.activation = config.activation
        wide, narrow = size or config.intermediate_size, config.hidden_size
        bias = config.mlp_bias
        self.gate = Projection(narrow, wide, bias=bias)
        self.up = Projection(narrow, wide, bias=bias)
        self.down = Projection(wide, narrow, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B,S,D] to [B,S,D]."""
        return self.down.forward_gated(self.gate(hidden), self.up(hidden), self.activation)
