"""Attention over a cache in blocks (PagedAttention, Kwon et al. 2023), prefill and decode in one call.

The query heads that share a key head fill the rows of one tile with their tokens, so keys are read
once for all of them. Long contexts are cut into parts of 1,024 keys, counted from position 0. With
few queries each part has a program of its own (Flash-Decoding, Dao et al. 2023), and a second kernel
merges them in order; otherwise one program walks them, merging as it goes. The arithmetic is that of
`flash_attention` either way, step by step: a token has the same bits in training, in a prefill cut
anywhere and in a decode step.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N tokens, H query heads, K key/value heads, S sequences, E head_dim, G dims of values, P splits
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import aligned, check, on_device_of, tl, triton
from fivefold.kernels.triton.online_softmax import (
    KEYS,
    PART,
    ROWS,
    VARYING,
    absorb,
    blocks_of_heads,
    first_seen,
    launch_options,
    load_rows,
    merge,
    normalised,
    seen_of,
)
from fivefold.kernels.triton.varlen import block_count, sequence_of_block, sequence_of_row

# Parts get programs of their own while what they leave for the merge is no more than this.
SPLIT_BYTES = 64 << 20
MERGED_HEADS = 4


def paged_attention(
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
    """out [N,H,G] of query [N,H,E] over caches [blocks,block_size,K,E] and [...,K,G].

    Sequence i has the tokens query_starts[i] to query_starts[i+1] ([S+1] int32), which are the last
    of its lengths[i] keys ([S] int32); key j is in slot j % block_size of block
    block_table[i, j // block_size] ([S,max_blocks] int32). A token sees keys up to its own, the last
    `window` of them if that is not 0. Slots and table entries beyond the lengths are never read.
    Tokens beyond the last sequence get zeros.
    """
    check("paged_attention", query, key_cache, value_cache)
    query = aligned(query)
    _check_shapes(query, key_cache, value_cache, block_table, query_starts, lengths)
    count, heads, head_dim = query.shape
    block_size, kv_heads, value_dim = value_cache.shape[1:]
    sequences, group = lengths.shape[0], heads // kv_heads
    out = query.new_empty(count, heads, value_dim)
    if not out.numel():
        return out
    parts = triton.cdiv(block_table.shape[1] * block_size, PART)
    splits = parts if parts * count * heads * value_dim * 4 <= SPLIT_BYTES else 1
    keys_a_split = triton.cdiv(parts, splits) * PART
    group_block = triton.next_power_of_2(group)
    widths = blocks_of_heads(head_dim, value_dim)
    weighted = query.new_empty(splits, count, heads, value_dim, dtype=torch.float32)
    largest, total = weighted.new_empty(2, splits, count, heads)
    tokens = ROWS // group_block
    lengths_of_calls = (query_starts, lengths, sequences, count)
    with on_device_of(query):
        paged_kernel[(block_count(count, sequences, tokens), kv_heads, splits)](
            query, key_cache, value_cache, block_table, weighted, largest, total,
            *lengths_of_calls, *query.stride()[:2], *key_cache.stride()[:3],
            *value_cache.stride()[:3], block_table.stride(0), block_size, group, window, scale,
            keys_a_split, E=head_dim, G=value_dim, SOFTCAP=softcap, TOKENS=tokens,
            GROUP=group_block, KEYS=KEYS, PART=PART, **widths,
            **launch_options(head_dim, value_dim, query.dtype),
        )  # fmt: skip
        merge_kernel[(count, triton.cdiv(heads, MERGED_HEADS))](
            weighted, largest, total, out, *lengths_of_calls, heads, window, keys_a_split,
            G=value_dim, HEADS=MERGED_HEADS, G_BLOCK=widths["G_BLOCK"],
        )  # fmt: skip
    return out


def _check_shapes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
) -> None:
    kv_heads, head_dim = key_cache.shape[2:]
    if (
        key_cache.shape[:3] != value_cache.shape[:3]
        or head_dim != query.shape[2]
        or query.shape[1] % kv_heads
        or query.shape[1] // kv_heads > ROWS
    ):
        raise FivefoldError(
            f"paged attention of queries {tuple(query.shape)} over caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}",
            "give [N,H,E] and [blocks,block_size,K,E or G] with H a multiple of K, at most 64 times",
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise FivefoldError(
            "paged attention over caches whose last dim is not dense", "make the caches contiguous"
        )
    sequences = lengths.shape[0]
    if block_table.shape[0] != sequences or query_starts.shape[0] != sequences + 1:
        raise FivefoldError(
            f"paged attention of {sequences} lengths, {block_table.shape[0]} rows of blocks and "
            f"{query_starts.shape[0]} starts",
            "give S, S and S + 1",
        )
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise FivefoldError("paged attention with a table that is not dense", "make it contiguous")


@triton.jit
def load_slots(
    cache: tl.tensor,
    table: tl.tensor,
    j: tl.tensor,
    keys: tl.tensor,
    block_size: tl.tensor,
    cache_block: tl.tensor,
    cache_slot: tl.tensor,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Rows of keys number `j` out of a paged cache; zeros beyond the sequence's `keys`.

    What is not loaded cannot be NaN, and 0 times a NaN would be.
    """
    block = tl.load(table + j // block_size, mask=j < keys, other=0).to(tl.int64)
    offset = block * cache_block + j % block_size * cache_slot
    return load_rows(cache, offset, j < keys, size, BLOCK)


@triton.jit(do_not_specialize=VARYING)
def paged_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    weighted_of: tl.tensor,
    largest_of: tl.tensor,
    total_of: tl.tensor,
    query_starts: tl.tensor,
    lengths: tl.tensor,
    sequences: tl.tensor,
    count: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_block: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_block: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    table_row: tl.tensor,
    block_size: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    keys_a_split: tl.tensor,
    E: tl.constexpr,
    G: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    E_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
) -> None:
    """TOKENS tokens with the GROUP heads of one key head, over one split of the keys."""
    block, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    sequence = sequence_of_block(query_starts, block, sequences, TOKENS)
    query_begin = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - query_begin
    first = (block - query_begin // TOKENS - sequence) * TOKENS
    if first >= queries:
        return
    keys = tl.load(lengths + sequence)
    begin = first_seen(first + keys - queries, window) // KEYS * KEYS
    end = tl.maximum(tl.minimum(keys, first + TOKENS + keys - queries), 0)
    begin = tl.maximum(begin, split * keys_a_split)
    end = tl.minimum(end, (split + 1) * keys_a_split)
    if begin >= end:
        return  # the merge kernel does not ask for it

    rows: tl.constexpr = TOKENS * GROUP
    slot = tl.arange(0, rows)
    row = first + slot // GROUP
    head = kv_head * group + slot % GROUP
    inside = (row < queries) & (slot % GROUP < group)
    position = row + keys - queries
    at = (query_begin + row).to(tl.int64)
    q = load_rows(query, at * query_row + head * query_head, inside, E, E_BLOCK)
    table += sequence.to(tl.int64) * table_row
    key += kv_head * key_head
    value += kv_head * value_head

    weighted = tl.zeros([rows, G_BLOCK], dtype=tl.float32)
    largest = tl.full([rows], float("-inf"), dtype=tl.float32)
    total = tl.zeros([rows], dtype=tl.float32)
    for part in range(begin // PART * PART, end, PART):
        part_weighted = tl.zeros([rows, G_BLOCK], dtype=tl.float32)
        part_largest = tl.full([rows], float("-inf"), dtype=tl.float32)
        part_total = tl.zeros([rows], dtype=tl.float32)
        for start in range(tl.maximum(part, begin), tl.minimum(part + PART, end), KEYS):
            j = start + tl.arange(0, KEYS)
            k = load_slots(key, table, j, keys, block_size, key_block, key_slot, E, E_BLOCK)
            v = load_slots(value, table, j, keys, block_size, value_block, value_slot, G, G_BLOCK)
            seen = seen_of(position[:, None], j[None, :], keys, window, True)
            part_weighted, part_largest, part_total = absorb(
                q, k, v, seen, part_weighted, part_largest, part_total, scale, SOFTCAP
            )
        weighted, largest, total = merge(
            weighted, largest, total, part_weighted, part_largest, part_total
        )

    target = (split.to(tl.int64) * count + at) * (tl.num_programs(1) * group) + head
    column = tl.arange(0, G_BLOCK)
    kept = inside[:, None] & (column < G)[None, :]
    tl.store(weighted_of + target[:, None] * G + column[None, :], weighted, mask=kept)
    tl.store(largest_of + target, largest, mask=inside)
    tl.store(total_of + target, total, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    weighted_of: tl.tensor,
    largest_of: tl.tensor,
    total_of: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    lengths: tl.tensor,
    sequences: tl.tensor,
    count: tl.tensor,
    heads: tl.tensor,
    window: tl.tensor,
    keys_a_split: tl.tensor,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    G_BLOCK: tl.constexpr,
) -> None:
    """The splits that one token sees, merged in order, for some of its heads."""
    token = tl.program_id(0)
    sequence = sequence_of_row(query_starts, token, sequences)
    keys = tl.load(lengths + sequence)
    query_end = tl.load(query_starts + sequence + 1)
    position = token - query_end + keys
    begin = first_seen(position, window)
    # A token beyond the last sequence sees nothing, nor does one before its sequence's first key.
    end = tl.where(token < query_end, tl.maximum(position + 1, 0), 0)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, G_BLOCK)
    kept = (head < heads)[:, None] & (column < G)[None, :]
    weighted = tl.zeros([HEADS, G_BLOCK], dtype=tl.float32)
    largest = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    for split in range(begin // keys_a_split, tl.cdiv(end, keys_a_split)):
        at = (split * count.to(tl.int64) + token) * heads + head
        part = tl.load(weighted_of + at[:, None] * G + column[None, :], mask=kept, other=0.0)
        part_largest = tl.load(largest_of + at, mask=head < heads, other=float("-inf"))
        part_total = tl.load(total_of + at, mask=head < heads, other=0.0)
        weighted, largest, total = merge(weighted, largest, total, part, part_largest, part_total)
    at = token.to(tl.int64) * heads + head
    result = normalised(weighted, total).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * G + column[None, :], result, mask=kept)
