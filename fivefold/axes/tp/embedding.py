"""The token embedding with its rows divided over the tensor axis."""

from __future__ import annotations

# B batch, S sequence, D hidden, V vocabulary, T tensor-parallel ranks
from torch import Tensor, nn
from torch.nn.functional import embedding


class VocabularyEmbedding(nn.Embedding):
    """Rows [start, start + V/T) of the table. Other ranks' tokens give zeros: a partial sum."""

    def __init__(self, weight: Tensor, start: int) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.start = start

    def forward(self, input: Tensor) -> Tensor:
        """int64 [B,S] to [B,S,D], to be summed over the ranks."""
        rows = input - self.start
        strange = (rows < 0) | (rows >= self.weight.shape[0])
        found = embedding(rows.masked_fill(strange, 0), self.weight)
        return found.masked_fill(strange.unsqueeze(-1), 0.0)
