"""Attention over a cache of blocks, prefill and decode in one call (Kwon et al. 2023).

It gives the bits of `flash_attention` over the same keys: one code walks both.
"""

from __future__ import annotations

# N queries, H query heads, K key/value heads, E head_dim, G value dims, S sequences
from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu import attention as native
from fivefold.kernels.flash_attention import by_torch
from fivefold.kernels.operator import define

NAME = "paged_attention"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """[N,H,E] over caches [blocks, block_size, K, E] and [..., G]: [N,H,G]; no gradient.

    Sequence s holds `lengths`[s] keys, those of its new queries included, in the blocks that
    row s of `block_table` [S, most blocks] lists in order; its queries are rows
    `query_starts`[s] to [s+1]. Lists are int32. Causal, aligned at the end as in
    `flash_attention`. What other slots hold does not matter, nor do table entries past the
    length or wholly behind every query's `window`. Raises `KernelError` for operands that do not
    fit.
    """
    return _attend(
        query, key_cache, value_cache, block_table, query_starts, lengths, window, scale, softcap
    )


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """The same by gathering each sequence's keys and the reference over documents."""
    native.check_cache(query, key_cache, value_cache, block_table, query_starts, lengths, window)
    native.check_starts(query.shape[0], "query_starts", query_starts)
    block_size = key_cache.shape[1]
    held = lengths.tolist()
    queries = query_starts.diff().tolist()
    keys, values = [key_cache.new_empty(0, *key_cache.shape[2:])], []
    values.append(value_cache.new_empty(0, *value_cache.shape[2:]))
    for sequence, length in enumerate(held):
        if not 0 <= length <= block_table.shape[1] * block_size:
            raise native.table_error(key_cache, block_table, lengths)
        at = torch.arange(length, device=query.device)
        entries = block_table[sequence].long()[at // block_size]
        # Blocks behind every query's window may have been given away: they count as zeros.
        needed = at > length - queries[sequence] - window if window else at >= 0
        needed = needed & (queries[sequence] > 0)
        wrong = (entries < 0) | (entries >= key_cache.shape[0])
        if (wrong & needed).any():
            raise native.table_error(key_cache, block_table, lengths)
        entries = torch.where(needed, entries, 0)
        for cache, found in ((key_cache, keys), (value_cache, values)):
            rows = (
                cache[entries, at % block_size]
                if cache.shape[0]
                else cache.new_zeros(length, *cache.shape[2:])
            )
            found.append(torch.where(needed[:, None, None], rows, 0))
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return by_torch(query)(
        query, torch.cat(keys), torch.cat(values), query_starts, starts,
        causal=True, window=window, scale=scale, softcap=softcap,
    )[0]  # fmt: skip


def _compute(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    operands = (query, key_cache, value_cache, block_table, query_starts, lengths)
    attend: Callable[..., Tensor] = paged_attention_reference
    match dispatch.choose(NAME, query.device.type, query.dtype).implementation:
        case "native":
            attend = native.paged_attention
        case "triton":
            from fivefold.kernels.triton import paged_attention as triton  # imports Triton

            return triton.paged_attention(*operands, window, scale, softcap)
    return attend(*operands, window=window, scale=scale, softcap=softcap)


def _shape(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Tensor | float) -> Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[3])


_attend = define(
    f"{NAME}(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor query_starts, Tensor lengths, int window, float scale, float softcap) -> Tensor",
    _compute,
    _shape,
)
