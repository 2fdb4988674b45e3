"""The token embedding with its rows divided over the tensor axis."""

from __future__ import annotations

# B batch, S sequence, D hidden, V vocabulary, T tensor-parallel ranks
from torch import Tensor, nn
from torch.nn.functional import embedding


class VocabularyEmbedding(nn.Module):
    """Rows [start, start + V/T) of the table. Other ranks' tokens give zeros: a partial sum."""

    def __init__(self, weight: nn.Parameter, start: int) -> None:
        super().__init__()
        self.weight = weight
        self.start = start

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B,S] to [B,S,D], to be summed over the ranks."""
        rows = tokens - self.start
        strange = (rows < 0) | (rows >= self.weight.shape[0])
        found = embedding(rows.masked_fill(strange, 0), self.weight)
        return found.masked_fill(strange.unsqueeze(-1), 0.0)
