"""Runs a decoder over the steps that a scheduler plans."""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, W rows whose logits are wanted
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from fivefold.engines.serve.paged.attention import PagedAttention
from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.engines.serve.paged.lowered import LoweredDecoder
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.model.decoder import Decoder

HEAD_ROWS = 64
"""Rows that go through the head at once: logits of a whole prompt would be the largest tensor."""


class PagedRunner:
    """One decoder and the cache that its sequences share; `lowered`, it takes one call a step."""

    def __init__(
        self, decoder: Decoder, cache: PagedCache, lowered: LoweredDecoder | None = None
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.lowered = lowered

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Tensor:
        """Compute the plan's chunks -> [W,V] fp32 logits of those that sample, in their order."""
        return self.decoder.logits(self.hidden(plan))

    @torch.inference_mode()
    def hidden(self, plan: StepPlan, whole: Collection[int] = ()) -> Tensor:
        """The same before the head: [W,D]. Of the sequences `whole` all rows are wanted."""
        self.cache.copy_blocks(plan.copies)
        batch = PagedBatch.of(plan, self.cache, whole)
        return self._states(batch).index_select(0, batch.rows)

    def _states(self, batch: PagedBatch) -> Tensor:
        """[N,D] after the final norm."""
        if self.lowered is not None:
            return self.lowered.states(batch, self.cache)
        attention = PagedAttention(batch, self.cache)
        return self.decoder(batch.tokens.unsqueeze(0), batch.positions.unsqueeze(0), attention)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[W,D] to [W,V] fp32."""
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def logits_in_pieces(self, hidden: Tensor) -> Iterator[Tensor]:
        """The same by `HEAD_ROWS` rows."""
        for piece in hidden.split(HEAD_ROWS):
            yield self.decoder.logits(piece)
