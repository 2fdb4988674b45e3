"""Runs a decoder over a batch of token lists with a KV cache: prompts in, then token by token."""

# B batch, S sequence, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.engines.serve.captured import CapturedStep
from fivefold.engines.serve.lowering import lower
from fivefold.kernels import dispatch
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.decoder import Decoder

PREFILL_TOKENS = 4096
"""Tokens of a prompt pass over all rows: bounds the memory of activations."""
CACHE_STEP = 256
"""The cache grows by at least this many tokens at a time."""


class ModelRunner:
    """One decoder, ready to run. Decoding uses the lowered form where there is one."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        # The lowered step adds in other orders than the modules do.
        self.lowered = None if dispatch.is_deterministic() else lower(decoder)
        if dispatch.is_deterministic():
            decoder.pack()  # or every product would pack its weight again
        weight = decoder.head_weight()
        self.device, self.dtype = weight.device, weight.dtype
        self._captured: CapturedStep | None = None

    @torch.inference_mode()
    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` rows."""
        return KVCache(self.decoder.config, batch, capacity, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append ragged prompts (none empty) to the rows -> [B,V] fp32 logits of their ends.

        Rows are padded at their end to the longest; a row's padding lies beyond its length.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        tokens = torch.tensor(
            [[*p, *[0] * (longest - len(p))] for p in prompts], device=self.device
        )
        last = torch.tensor(lengths, device=self.device) - 1
        width = max(1, PREFILL_TOKENS // len(prompts))
        ends = torch.empty(0)
        for start in range(0, longest, width):
            piece = tokens[:, start : start + width]
            hidden = self.decoder(piece, cache.positions(piece.shape[1]), CachedAttention(cache))
            cache.advance([min(max(n - start, 0), piece.shape[1]) for n in lengths])
            if start == 0:
                ends = hidden.new_zeros(len(prompts), hidden.shape[-1])
            here = (last >= start) & (last < start + width)
            ends[here] = hidden[here, last[here] - start]
        return self.decoder.logits(ends)

    @torch.inference_mode()
    def decode(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        """Append one token a row -> [B,V] fp32 logits."""
        needed = max(cache.lengths) + 1
        if needed > cache.capacity:
            cache.reserve(needed + max(CACHE_STEP, needed // 2))
        ids = torch.tensor(tokens, device=self.device)
        if self.is_captured:
            logits = self._step_of(cache)(ids, cache).clone()
        elif self.lowered is not None:
            logits = self.lowered.step(ids, cache)
        else:
            hidden = self.decoder(ids[:, None], cache.positions(1), CachedAttention(cache))
            logits = self.decoder.logits(hidden[:, 0])
        cache.advance([1] * len(tokens))
        return logits

    @property
    def is_captured(self) -> bool:
        """Whether decoding replays a CUDA graph: where kernels read lengths on the device."""
        own = dispatch.is_own("paged_attention", self.device.type, self.dtype)
        dynamic = any(rope.kind == "dynamic" for rope in self.decoder.config.ropes)
        sparse = self.decoder.config.moe is not None  # counts of experts' rows go to the host
        return self.device.type == "cuda" and own and not dynamic and not sparse

    def _step_of(self, cache: KVCache) -> CapturedStep:
        """The recorded step of this cache, recorded anew when its tensors moved."""
        if self._captured is None or not self._captured.fits(cache):
            self._captured = CapturedStep(self.decoder, cache)
        return self._captured
