"""The experts: gated feed-forwards of one shape, each over its own rows."""

from __future__ import annotations

# M rows, D hidden, F an expert's inner width, X experts held here
import torch
from torch import Tensor, nn

from fivefold.kernels.gated import gated
from fivefold.kernels.grouped_linear import grouped_linear
from fivefold.model.config import ModelConfig, MoEConfig


class Experts(nn.Module):
    """Weights of all experts stacked on dim 0. A rank may hold some: as many as the dim has."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.activation = config.activation
        inner = (moe.experts, moe.expert_size, config.hidden_size)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(moe.experts, config.hidden_size, moe.expert_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M,D] in the order of experts, `counts` [X] int64 for each, to [M,D]."""
        inner = gated(
            grouped_linear(rows, self.gate, counts),
            grouped_linear(rows, self.up, counts),
            self.activation,
        )
        return grouped_linear(inner, self.down, counts)
