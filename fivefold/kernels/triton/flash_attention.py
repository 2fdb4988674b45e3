"""Attention of packed documents without their scores in memory (FlashAttention-2, Dao 2023).

Forward only; the backward pass is in flash_attention_backward.py. The rule for what a query sees is
stated at `flash_attention`, the arithmetic of a block in online_softmax.py.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N queries, M keys, H query heads, K key/value heads, S sequences, E head_dim, G dims of values
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import aligned, check, on_device_of, tl, triton
from fivefold.kernels.triton.online_softmax import (
    KEYS,
    LN2,
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
from fivefold.kernels.triton.varlen import block_count, sequence_of_block


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """(out [N,H,G], log-sum-exp of the scores [H,N] fp32) of [N,H,E], [M,K,E] and [M,K,G].

    Sequence i has queries query_starts[i] to query_starts[i+1] ([S+1] int32, on the device) and keys
    likewise; either may be none. Its query i is at position p = keys - queries + i: the last query
    meets the last key. It sees keys up to p if `causal`, and from p - window + 1 on if `window` is
    not 0. Where it sees none, out is 0 and the log-sum-exp -inf. `softcap` 0 is none.
    """
    check("flash_attention", query, key, value)
    query, key, value = aligned(query), aligned(key), aligned(value)
    count, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    check_heads(query, key, value, query_starts, key_starts)
    out = query.new_empty(count, heads, value_dim)
    lse = torch.empty(heads, count, dtype=torch.float32, device=query.device)
    sequences = query_starts.shape[0] - 1
    if out.numel():
        with on_device_of(query):
            forward_kernel[(block_count(count, sequences, ROWS), heads)](
                query, key, value, out, lse, query_starts, key_starts, sequences, count,
                *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], heads // kv_heads,
                window, scale, E=head_dim, G=value_dim, SOFTCAP=softcap, CAUSAL=causal,
                ROWS=ROWS, KEYS=KEYS, PART=PART, **blocks_of_heads(head_dim, value_dim),
                **launch_options(head_dim, value_dim, query.dtype),
            )  # fmt: skip
    return out, lse


def check_heads(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor
) -> None:
    """Raises FivefoldError where shapes do not belong together."""
    heads, head_dim = query.shape[1:]
    if key.shape[2] != head_dim or key.shape[:2] != value.shape[:2] or heads % key.shape[1]:
        raise FivefoldError(
            f"attention of queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)}",
            "give [N,H,E], [M,K,E] and [M,K,G] with H a multiple of K",
        )
    if query_starts.shape != key_starts.shape:
        raise FivefoldError(
            f"{len(query_starts) - 1} sequences of queries and {len(key_starts) - 1} of keys",
            "give two cumulative lengths of one size",
        )


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    sequences: tl.tensor,
    count: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    E: tl.constexpr,
    G: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    E_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
) -> None:
    """ROWS queries of one sequence and one head a program."""
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_block(query_starts, block, sequences, ROWS)
    query_begin = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - query_begin
    first = (block - query_begin // ROWS - sequence) * ROWS
    if first >= queries:
        return
    key_begin = tl.load(key_starts + sequence)
    keys = tl.load(key_starts + sequence + 1) - key_begin
    row = first + tl.arange(0, ROWS)
    position = row + keys - queries
    at = (query_begin + row).to(tl.int64)
    q = load_rows(query + head * query_head, at * query_row, row < queries, E, E_BLOCK)
    key += key_begin.to(tl.int64) * key_row + head // group * key_head
    value += key_begin.to(tl.int64) * value_row + head // group * value_head

    begin = first_seen(first + keys - queries, window) // KEYS * KEYS
    end = keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(keys, first + ROWS + keys - queries), 0)
    weighted = tl.zeros([ROWS, G_BLOCK], dtype=tl.float32)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for part in range(begin // PART * PART, end, PART):
        part_weighted = tl.zeros([ROWS, G_BLOCK], dtype=tl.float32)
        part_largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        part_total = tl.zeros([ROWS], dtype=tl.float32)
        for start in range(tl.maximum(part, begin), tl.minimum(part + PART, end), KEYS):
            j = start + tl.arange(0, KEYS)
            wide = j.to(tl.int64)
            k = load_rows(key, wide * key_row, j < keys, E, E_BLOCK)
            v = load_rows(value, wide * value_row, j < keys, G, G_BLOCK)
            seen = seen_of(position[:, None], j[None, :], keys, window, CAUSAL)
            part_weighted, part_largest, part_total = absorb(
                q, k, v, seen, part_weighted, part_largest, part_total, scale, SOFTCAP
            )
        weighted, largest, total = merge(
            weighted, largest, total, part_weighted, part_largest, part_total
        )

    column = tl.arange(0, G_BLOCK)
    target = out + (at[:, None] * tl.num_programs(1) + head) * G + column[None, :]
    inside = (row < queries)[:, None] & (column < G)[None, :]
    tl.store(target, normalised(weighted, total).to(out.dtype.element_ty), mask=inside)
    sum_of_all = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    tl.store(lse + head.to(tl.int64) * count + at, sum_of_all * LN2, mask=row < queries)
