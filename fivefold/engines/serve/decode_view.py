"""What all layers of one decode step share: angles, places in the cache, masks."""

# B batch, H query heads, K key/value heads, E head_dim, T held tokens

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.kernels.decode_attention import decode_attention
from fivefold.model.attention_backend import causal_mask
from fivefold.model.cache import KVCache
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.model.decoder import Decoder


class DecodeView:
    """A cache as the next token of every row sees it. Made anew for each step."""

    def __init__(self, cache: KVCache, decoder: Decoder) -> None:
        self._cache = cache
        self._end = max(cache.lengths) + 1
        self._uniform = len(set(cache.lengths)) == 1
        self._places = cache.positions(1)  # [B,1]
        self._rows = torch.arange(len(cache.lengths), device=self._places.device)
        self._masks: dict[int | None, Tensor | None] = {}
        # [B,1,E]: cos twice, and sin with the sign that the swapped halves need
        self._angles = {
            rope: (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
            for rope, (cos, sin) in decoder.rope_tables(self._places).items()
        }

    def rotate(self, x: Tensor, rope: RopeConfig) -> Tensor:
        """Rotary positions on heads [B,N,E], in fp32, rounded once."""
        cos, sin = self._angles[rope]
        wide = x.float()
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, config: ModelConfig
    ) -> Tensor:
        """Write key and value [B,K,E], then attend with query [B,H,E] -> [B,H,E]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        window = config.windows[layer]
        start, mask = 0, None
        if self._uniform:
            keys.select(1, self._end - 1).copy_(key)
            values.select(1, self._end - 1).copy_(value)
            if window is not None:
                start = max(0, self._end - window)
        else:
            keys.index_put_((self._rows, self._places[:, 0]), key)
            values.index_put_((self._rows, self._places[:, 0]), value)
            mask = self._mask(window)
        return decode_attention(
            query,
            keys.narrow(1, start, self._end - start),
            values.narrow(1, start, self._end - start),
            mask=mask,
            scale=config.scale,
            softcap=config.attention_softcap,
        )

    def _mask(self, window: int | None) -> Tensor | None:
        """[B,T] for rows that hold different numbers of tokens; one per distinct window."""
        if window not in self._masks:
            held = torch.arange(self._end, device=self._places.device)[None]
            self._masks[window] = causal_mask(self._places, held, window)[:, 0]
        return self._masks[window]
