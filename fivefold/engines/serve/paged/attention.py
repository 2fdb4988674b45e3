"""Attention of one step over the paged cache: prompts and single tokens in one call a layer."""

from __future__ import annotations

# N tokens, H query heads, K key/value heads, E head_dim, G value dims
from torch import Tensor

from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.kernels.paged_attention import paged_attention


class PagedAttention:
    """An attention backend: writes the step's keys and values into the cache, then attends.

    A cache in a narrower format than the model's rounds keys and values, and queries with them:
    products are taken in the cache's format, and the result is given back in the model's.
    `first_layer` is the one that the cache of a pipeline stage counts as its 0.
    """

    def __init__(self, batch: PagedBatch, cache: PagedCache, first_layer: int = 0) -> None:
        self._batch = batch
        self._first = first_layer
        self._cache = cache
        self._at = batch.slots // cache.block_size, batch.slots % cache.block_size

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
        """[1,N,H,E], [1,N,K,E], [1,N,K,G] to [1,N,H,G]."""
        batch, cache, layer = self._batch, self._cache, layer - self._first
        cache.write(layer, self._at, key[0].to(cache.dtype), value[0].to(cache.dtype))
        attended = paged_attention(
            query[0].to(cache.dtype), cache.keys[layer], cache.values[layer], batch.block_table,
            batch.query_starts, batch.lengths, scale=scale, window=window or 0,
            softcap=softcap or 0.0,
        )  # fmt: skip
        return attended.unsqueeze(0).to(query.dtype)
