"""Gradients of attention without atomics (FlashAttention-2's backward, Dao 2023, in three kernels).

Queries' gradients are summed by programs that own queries, keys' and values' by programs that own
keys: the weights are computed twice, and every sum has one owner and one order. The query heads
that share a key head are part of its owner's sum.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# N queries, M keys, H query heads, K key/value heads, S sequences, E head_dim, G dims of values
import torch
from torch import Tensor

from fivefold.kernels.triton.flash_attention import check_heads
from fivefold.kernels.triton.language import PRECISION, aligned, check, on_device_of, tl, triton
from fivefold.kernels.triton.online_softmax import (
    LOG2E,
    VARYING,
    blocks_of_heads,
    first_seen,
    load_rows,
    scores_of,
    seen_of,
)
from fivefold.kernels.triton.varlen import block_count, sequence_of_block

ALONG_ROWS = 16


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(d_query [N,H,E], d_key [M,K,E], d_value [M,K,G]) for grad [N,H,G] of out [N,H,G].

    As `flash_attention`, whose out and lse [H,N] these are. A ring of ranks hands in those over the
    keys of all ranks, and gets what its own keys add to the gradients.
    """
    check("flash_attention_backward", grad, query, key, value, out, lse)
    check_heads(query, key, value, query_starts, key_starts)
    grad, query, key, value, out = (aligned(t) for t in (grad, query, key, value, out))
    lse = lse.contiguous()
    count, heads, head_dim = query.shape
    keys, kv_heads, value_dim = value.shape
    sequences = query_starts.shape[0] - 1
    along = torch.empty_like(lse)
    d_query, d_key, d_value = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    )
    widths = {"E": head_dim, "G": value_dim} | blocks_of_heads(head_dim, value_dim)
    block = backward_block(head_dim, value_dim, query.dtype)
    shared = dict(
        SOFTCAP=softcap, CAUSAL=causal, ROWS=block, KEYS=block, **widths,
        num_warps=8 if max(head_dim, value_dim) > 64 else 4, num_stages=1,
    )  # fmt: skip
    tensors = (query, key, value, grad, lse, along)
    strides = (
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *grad.stride()[:2],
    )  # fmt: skip
    lengths = (query_starts, key_starts, sequences, count)
    numbers = (heads // kv_heads, window, scale)
    with on_device_of(query):
        if count:
            along_kernel[(triton.cdiv(count, ALONG_ROWS), heads)](
                grad, out, along, count, *grad.stride()[:2], *out.stride()[:2],
                G=value_dim, G_BLOCK=widths["G_BLOCK"], ROWS=ALONG_ROWS,
            )  # fmt: skip
            queries_kernel[(block_count(count, sequences, block), heads)](
                *tensors, d_query, *lengths, *strides, *numbers, **shared
            )
        if keys:
            keys_kernel[(block_count(keys, sequences, block), kv_heads)](
                *tensors, d_key, d_value, *lengths, *strides, *numbers, **shared
            )
    return d_query, d_key, d_value


def backward_block(head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Queries and keys of a block: fewer where tiles of 64 would overflow registers or memory."""
    return 64 if dtype.itemsize == 2 and max(head_dim, value_dim) <= 128 else 32


@triton.jit
def along_kernel(
    grad: tl.tensor,
    out: tl.tensor,
    along: tl.tensor,
    count: tl.tensor,
    grad_row: tl.tensor,
    grad_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """grad . out of each query and head [H,N]: what softmax's gradient takes from every weight."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    g = load_rows(grad + head * grad_head, row * grad_row, inside, G, G_BLOCK).to(tl.float32)
    o = load_rows(out + head * out_head, row * out_row, inside, G, G_BLOCK).to(tl.float32)
    tl.store(along + head * count + row, tl.sum(g * o, axis=1), mask=inside)


@triton.jit
def weights_of(scores: tl.tensor, lse: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Softmax weights from capped scores and the log-sum-exp; exactly 0 where nothing is seen."""
    exponent = tl.where(seen, (scores - lse) * LOG2E, float("-inf"))
    return tl.exp2(exponent)


@triton.jit
def slope_of(
    weights: tl.tensor,
    slope: tl.tensor,
    along: tl.tensor,
    scores: tl.tensor,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Gradient of scaled scores before the cap, from the gradient `slope` of the weights."""
    result = weights * (slope - along)
    if SOFTCAP > 0:
        bent = scores / SOFTCAP
        result *= 1 - bent * bent
    return result


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    along: tl.tensor,
    d_query: tl.tensor,
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
    grad_row: tl.tensor,
    grad_head: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    E_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
) -> None:
    """d_query of ROWS queries of one head: the sum over the keys they see, in order."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    inside = row < queries
    at = (query_begin + row).to(tl.int64)
    q = load_rows(query + head * query_head, at * query_row, inside, E, E_BLOCK)
    g = load_rows(grad + head * grad_head, at * grad_row, inside, G, G_BLOCK)
    log_sum = tl.load(lse + head * count + at, mask=inside, other=0.0)
    taken = tl.load(along + head * count + at, mask=inside, other=0.0)
    key += key_begin.to(tl.int64) * key_row + head // group * key_head
    value += key_begin.to(tl.int64) * value_row + head // group * value_head

    begin = first_seen(first + keys - queries, window) // KEYS * KEYS
    end = keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(keys, first + ROWS + keys - queries), 0)
    total = tl.zeros([ROWS, E_BLOCK], dtype=tl.float32)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        wide = j.to(tl.int64)
        k = load_rows(key, wide * key_row, j < keys, E, E_BLOCK)
        v = load_rows(value, wide * value_row, j < keys, G, G_BLOCK)
        scores = scores_of(q, k, scale, SOFTCAP)
        seen = seen_of(position[:, None], j[None, :], keys, window, CAUSAL)
        weights = weights_of(scores, log_sum[:, None], seen)
        slope = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        slope = slope_of(weights, slope, taken[:, None], scores, SOFTCAP)
        total = tl.dot(slope.to(k.dtype), k, total, input_precision=PRECISION)

    column = tl.arange(0, E_BLOCK)
    target = d_query + (at[:, None] * tl.num_programs(1) + head) * E + column[None, :]
    kept = inside[:, None] & (column < E)[None, :]
    tl.store(target, (total * scale).to(d_query.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    along: tl.tensor,
    d_key: tl.tensor,
    d_value: tl.tensor,
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
    grad_row: tl.tensor,
    grad_head: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    E_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
) -> None:
    """d_key and d_value of KEYS keys of one head: over its query heads, over their queries, in order.

    Scores and weights stand the other way round here, [KEYS,ROWS], as the products need them.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence = sequence_of_block(key_starts, block, sequences, KEYS)
    key_begin = tl.load(key_starts + sequence)
    keys = tl.load(key_starts + sequence + 1) - key_begin
    first = (block - key_begin // KEYS - sequence) * KEYS
    if first >= keys:
        return
    query_begin = tl.load(query_starts + sequence).to(tl.int64)
    queries = tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence)
    j = first + tl.arange(0, KEYS)
    at = (key_begin + j).to(tl.int64)
    k = load_rows(key + kv_head * key_head, at * key_row, j < keys, E, E_BLOCK)
    v = load_rows(value + kv_head * value_head, at * value_row, j < keys, G, G_BLOCK)

    shift = keys - queries  # from a query's number to its position
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // ROWS * ROWS
    # The last key of the block is seen up to window - 1 positions after it.
    end = tl.where(window > 0, tl.minimum(queries, first + KEYS - 1 + window - shift), queries)
    keys_total = tl.zeros([KEYS, E_BLOCK], dtype=tl.float32)
    values_total = tl.zeros([KEYS, G_BLOCK], dtype=tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        for start in range(begin, end, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = row < queries
            source = query_begin + row
            q = load_rows(query + head * query_head, source * query_row, inside, E, E_BLOCK)
            g = load_rows(grad + head * grad_head, source * grad_row, inside, G, G_BLOCK)
            log_sum = tl.load(lse + head * count + source, mask=inside, other=0.0)
            taken = tl.load(along + head * count + source, mask=inside, other=0.0)
            scores = scores_of(k, q, scale, SOFTCAP)
            seen = seen_of((row + shift)[None, :], j[:, None], keys, window, CAUSAL)
            weights = weights_of(scores, log_sum[None, :], seen & inside[None, :])
            values_total = tl.dot(weights.to(g.dtype), g, values_total, input_precision=PRECISION)
            slope = tl.dot(v, tl.trans(g), input_precision=PRECISION)
            slope = slope_of(weights, slope, taken[None, :], scores, SOFTCAP)
            keys_total = tl.dot(slope.to(q.dtype), q, keys_total, input_precision=PRECISION)

    heads = tl.num_programs(1)
    column = tl.arange(0, E_BLOCK)
    target = d_key + (at[:, None] * heads + kv_head) * E + column[None, :]
    kept = (j < keys)[:, None] & (column < E)[None, :]
    tl.store(target, (keys_total * scale).to(d_key.dtype.element_ty), mask=kept)
    column = tl.arange(0, G_BLOCK)
    target = d_value + (at[:, None] * heads + kv_head) * G + column[None, :]
    kept = (j < keys)[:, None] & (column < G)[None, :]
    tl.store(target, values_total.to(d_value.dtype.element_ty), mask=kept)
