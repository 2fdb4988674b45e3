"""A contiguous key/value cache, and attention over it for prompts and for single tokens."""

from __future__ import annotations

# B batch, S new tokens a row, C capacity, K key/value heads, E head_dim, H query heads
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fivefold.kernels import dispatch
from fivefold.kernels.attention import attention
from fivefold.kernels.paged_attention import paged_attention
from fivefold.model.attention_backend import causal_mask, row_starts
from fivefold.model.config import ModelConfig


class KVCache:
    """Keys [B,C,K,E] and values of every layer, and how many tokens each row holds.

    Values have dims of their own with latent attention, whose unfolded heads are what is kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, capacity, config.num_kv_heads)
        # Zeros: what was never written meets a weight of 0 in the softmax, and 0 x NaN is NaN.
        self.keys, self.values = (
            [torch.zeros((*shape, dim), dtype=dtype, device=device) for _ in config.windows]
            for dim in (config.head_dim, config.value_dim)
        )
        self.capacity = capacity
        self.lengths = [0] * batch

    def positions(self, count: int) -> Tensor:
        """[B,count] places of the next `count` tokens of each row."""
        device = self.keys[0].device
        starts = torch.tensor(self.lengths, device=device).unsqueeze(-1)
        return starts + torch.arange(count, device=device)

    def advance(self, counts: Sequence[int]) -> None:
        """Count the tokens that a forward pass appended to each row as held."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what is beyond `lengths`."""
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, which take the places 0, 1, ..."""
        self.keys = [key[list(rows)] for key in self.keys]
        self.values = [value[list(rows)] for value in self.values]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, keeping what is held."""
        more = (0, 0, 0, 0, 0, max(0, capacity - self.capacity))
        self.keys = [pad(key, more) for key in self.keys]
        self.values = [pad(value, more) for value in self.values]
        self.capacity = max(self.capacity, capacity)


class CachedAttention:
    """Appends S tokens a row to a cache and attends to all that the row then holds.

    Rows may hold different numbers of tokens. A row with fewer than S new tokens is padded at its
    end: what padding writes lies beyond the row's length and is written over by its next tokens.
    Use one instance for one forward pass; `cache.advance` afterwards.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._uniform = len(set(cache.lengths)) == 1
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._blocks: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Write the new keys and values, then attend."""
        count = query.shape[1]
        if dispatch.is_own("paged_attention", query.device.type, query.dtype):
            self._append(layer, key, value)
            return self._over_blocks(query, layer, window, scale, softcap)
        keys, values = self._append(layer, key, value)
        held = keys.shape[1]
        start = held - count
        alone = self._uniform and (count == 1 or start == 0) and (window is None or held <= window)
        mask = None if alone else self._mask(count, held, window)
        return attention(
            query, keys, values, mask=mask, causal=alone and count > 1, scale=scale,
            softcap=softcap,
        )  # fmt: skip

    def _over_blocks(
        self, query: Tensor, layer: int, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """The cache as blocks of its whole capacity, one a row."""
        batch, count = query.shape[:2]
        if self._blocks is None:
            rows = torch.arange(batch, dtype=torch.int32, device=query.device)
            held = torch.tensor(self._cache.lengths, dtype=torch.int32, device=query.device)
            starts = row_starts(batch, count, query.device)
            self._blocks = rows.unsqueeze(1), starts, held + count
        attended = paged_attention(
            query.flatten(0, 1), self._cache.keys[layer], self._cache.values[layer], *self._blocks,
            scale=scale, window=window or 0, softcap=softcap or 0.0,
        )  # fmt: skip
        return attended.unflatten(0, (batch, count))

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        count = key.shape[1]
        end = max(self._cache.lengths) + count
        if self._uniform:
            keys[:, end - count : end] = key
            values[:, end - count : end] = value
        else:
            rows = torch.arange(key.shape[0], device=key.device).unsqueeze(-1)
            places = self._cache.positions(count)
            keys[rows, places] = key
            values[rows, places] = value
        return keys[:, :end], values[:, :end]

    def _mask(self, count: int, held: int, window: int | None) -> Tensor:
        if (count, window) not in self._masks:
            queries = self._cache.positions(count)
            keys = torch.arange(held, device=queries.device).unsqueeze(0)
            self._masks[count, window] = causal_mask(queries, keys, window)
        return self._masks[count, window]
