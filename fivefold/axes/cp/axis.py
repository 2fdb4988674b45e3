"""The context axis of one rank: its part of a micro-batch, and the attention over all parts."""

from __future__ import annotations

# B batch, S tokens of the whole row
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from fivefold.axes.cp.gather import GatherAttention
from fivefold.axes.cp.ring import RingAttention
from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import ContextSplit, LocalBatch
from fivefold.axes.cp.ulysses import UlyssesAttention
from fivefold.model.attention_backend import AttentionBackend, CausalAttention, PackedAttention


class ContextAxis:
    """What the rest of a run asks of context parallelism.

    ring_group: ranks among which keys and values move, in `split`'s order of ring ranks.
    ulysses_group: ranks that share out heads. None where that is one rank (`groups.py` cuts both).
    """

    def __init__(
        self,
        split: ContextSplit,
        ring_group: dist.ProcessGroup | None,
        ulysses_group: dist.ProcessGroup | None,
        kind: Literal["ring", "gather"] = "ring",
    ) -> None:
        assert (split.ring > 1) == (ring_group is not None), "a ring of several ranks has a group"
        assert (split.ulysses > 1) == (ulysses_group is not None), "and so has a head exchange"
        self.context_split = split
        self._ring_group = ring_group
        self._ulysses_group = ulysses_group
        self._kind = kind

    def split(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Tensor | None
    ) -> LocalBatch:
        """This rank's part of rows [B,S]; see `ContextSplit.split`."""
        return self.context_split.split(tokens, labels, positions, documents)

    def attention(
        self, documents: Tensor | None, places: Tensor, length: int | None = None
    ) -> AttentionBackend:
        """The backend for one micro-batch: `documents`, `places` and `length` of its LocalBatch.

        `documents` are those of whole rows. Without `length`, ranks hold equally many tokens, as
        they do unless `ContextSplit.multiple` says otherwise. One object serves all layers; all
        ranks of the axis must call it for the same layers in the same order, as they do when
        they run the same model.
        """
        split = self.context_split
        length = length or places.shape[0] * split.cp
        assert documents is None or documents.shape[1] == length, "documents of the whole row"
        inner = self._over_tokens(documents, length)
        if self._ulysses_group is None:
            return inner
        neighbours = split.ring_rank * split.ulysses
        runs = [split.runs(length, neighbours + other) for other in range(split.ulysses)]
        return UlyssesAttention(self._ulysses_group, inner, runs, split.ulysses_rank)

    def _over_tokens(self, documents: Tensor | None, length: int) -> AttentionBackend:
        split = self.context_split
        if self._ring_group is None:
            return CausalAttention() if documents is None else PackedAttention(documents)
        runs = [split.ring_runs(length, ring_rank) for ring_rank in range(split.ring)]
        sight = Sight(runs[split.ring_rank], documents)
        backend = RingAttention if self._kind == "ring" else GatherAttention
        return backend(self._ring_group, sight, runs)
