"""One micro-batch, as the training step reads it."""

from __future__ import annotations

# B batch, S sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of token ids and, for every token, what it should predict.

    tokens: [B,S] int64.
    labels: [B,S] int64, the next token of the same document; -100 where there is none, or where
        it is not to be learnt.
    positions: [B,S] int64, from 0 for every document (and for a document's rest, where a
        sequence starts in the middle of it).
    documents: [B,S] int64, 0, 1, ... within each row; -1 on padding. None: one document a row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None

    @property
    def targets(self) -> int:
        """How many tokens have a label."""
        return int((self.labels != -100).sum())
