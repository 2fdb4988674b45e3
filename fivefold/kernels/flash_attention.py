"""Attention over packed documents, without the matrix of scores (Dao et al. 2022).

Documents of any lengths lie one behind the other; where each begins is a list of cumulative
starts. A row's result does not depend on the documents beside it, nor on how its queries were cut
into calls, and `paged_attention` gives the same bits over a cache.
"""

from __future__ import annotations

# N queries, M keys, H query heads, K key/value heads, E head_dim, G value dims, S sequences
# T keys of one sequence, Q its queries
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.attention_in_blocks import attention_in_blocks
from fivefold.kernels.cpu import attention as native
from fivefold.kernels.operator import define, differentiate

NAME = "flash_attention"


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """[N,H,E] over [M,K,E] and [M,K,G]: ([N,H,G], log of the sum of e^score [H,N] in fp32).

    `query_starts` and `key_starts` [S+1] int32 are where sequences begin, and the last one ends;
    sequences may be empty. `causal` is aligned at the end: the last query sees the last key, and
    with a `window` (0: none) no more than so many keys up to its own. A query that sees nothing
    gives zeros and -inf, as do rows outside all sequences. `softcap` (0: none) is c tanh(score/c).

    The log-sum-exp has no gradient: a ring of ranks merges by it and calls
    `flash_attention_backward` itself. Raises `KernelError` for operands that do not fit.
    """
    return _attend(query, key, value, query_starts, key_starts, causal, window, scale, softcap)


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for that of `out`, in their formats.

    `out` and `lse` may be those over more keys than are given here: then this is these keys' part.
    """
    return _attend_backward(
        grad, query, key, value, out, lse, query_starts, key_starts, causal, window, scale, softcap
    )


def flash_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same by matmuls in fp32 (fp64 for fp64 inputs), document by document."""
    native.check_documents(query, key, value, query_starts, key_starts, causal, window)
    wide = torch.promote_types(query.dtype, torch.float32)
    outs, sums, at = [], [], 0
    for queries, keys in _documents(query_starts, key_starts, query.shape[0], key.shape[0]):
        outs.append(query.new_zeros(queries.start - at, query.shape[1], value.shape[2]))
        sums.append(query.new_full((query.shape[1], queries.start - at), -torch.inf, dtype=wide))
        scores = _scores(query[queries], key[keys], scale, softcap)
        scores = scores.masked_fill(~_seen(scores, causal, window), -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # of queries that see nothing
        values = _spread(value[keys], query.shape[1])
        outs.append(torch.einsum("hqt,thg->qhg", weights, values).to(query.dtype))
        sums.append(torch.logsumexp(scores, -1).detach())
        at = queries.stop
    outs.append(query.new_zeros(query.shape[0] - at, query.shape[1], value.shape[2]))
    sums.append(query.new_full((query.shape[1], query.shape[0] - at), -torch.inf, dtype=wide))
    return torch.cat(outs), torch.cat(sums, dim=1)


def flash_attention_backward_reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formula: d score = weight (d weight - sum of weight d weight)."""
    native.check_documents(query, key, value, query_starts, key_starts, causal, window)
    native.check_results(grad, query, value, out, lse)
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, kv_heads = query.shape[1], key.shape[1]
    grads = tuple(torch.zeros_like(x, dtype=wide) for x in (query, key, value))
    for queries, keys in _documents(query_starts, key_starts, query.shape[0], key.shape[0]):
        scores = _scores(query[queries], key[keys], scale, softcap)
        total = lse[:, queries, None].to(wide)
        hidden = ~_seen(scores, causal, window) | (total == -torch.inf)
        weights = torch.exp(scores - total).masked_fill(hidden, 0.0)
        slope = grad[queries].to(wide)
        turned = torch.einsum("qhg,thg->hqt", slope, _spread(value[keys], heads))
        mean = (slope * out[queries].to(wide)).sum(-1).T.unsqueeze(-1)
        d_scores = weights * (turned - mean) * scale
        if softcap:
            d_scores = d_scores * (1 - (scores / softcap).square())
        grads[0][queries] = torch.einsum("hqt,the->qhe", d_scores, _spread(key[keys], heads))
        d_key = torch.einsum("hqt,qhe->the", d_scores, query[queries].to(wide))
        d_value = torch.einsum("hqt,qhg->thg", weights, slope)
        grads[1][keys] = d_key.unflatten(1, (kv_heads, -1)).sum(2)
        grads[2][keys] = d_value.unflatten(1, (kv_heads, -1)).sum(2)
    d_query, d_key, d_value = (g.to(query.dtype) for g in grads)
    return d_query, d_key, d_value


def _documents(
    query_starts: Tensor, key_starts: Tensor, queries: int, keys: int
) -> Iterator[tuple[slice, slice]]:
    """Where the queries and the keys of each document lie."""
    native.check_starts(queries, "query_starts", query_starts)
    native.check_starts(keys, "key_starts", key_starts)
    rows, columns = query_starts.tolist(), key_starts.tolist()
    for i in range(len(rows) - 1):
        yield slice(rows[i], rows[i + 1]), slice(columns[i], columns[i + 1])


def _spread(x: Tensor, heads: int) -> Tensor:
    """[T,K,*] to [T,H,*], a key head once for each query head, in fp32 or fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.repeat_interleave(heads // x.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float) -> Tensor:
    """[H,Q,T], not yet masked."""
    keys = _spread(key, query.shape[1])
    scores = torch.einsum("qhe,the->hqt", query.to(keys.dtype), keys) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _seen(scores: Tensor, causal: bool, window: int) -> Tensor:
    """[Q,T]: whether a query sees a key."""
    queries, keys = scores.shape[-2:]
    if not causal:
        return torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    at = torch.arange(queries, device=scores.device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=scores.device)
    seen = key <= at
    return seen & (key > at - window) if window else seen


def _compute(
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
    operands = (query, key, value, query_starts, key_starts)
    match dispatch.choose(NAME, query.device.type, query.dtype).implementation:
        case "native":
            attend = native.flash_attention
        case "triton":
            from fivefold.kernels.triton import flash_attention as triton  # imports Triton

            return triton.flash_attention(*operands, causal, window, scale, softcap)
        case "torch":
            attend = by_torch(query)
    return attend(*operands, causal=causal, window=window, scale=scale, softcap=softcap)


def by_torch(query: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Plain torch's: in blocks of one shape where bits must not depend on the batch."""
    if dispatch.is_deterministic() and query.dtype != torch.float64:
        return attention_in_blocks
    return flash_attention_reference


def _shapes(
    query: Tensor, key: Tensor, value: Tensor, *_: Tensor | float | bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(*query.shape[:2], value.shape[2]),
        query.new_empty(query.shape[1], query.shape[0], dtype=wide),
    )


def _compute_backward(
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
    operands = (grad, query, key, value, out, lse, query_starts, key_starts)
    slopes: Callable[..., tuple[Tensor, Tensor, Tensor]] = flash_attention_backward_reference
    match dispatch.choose(NAME, query.device.type, query.dtype).implementation:
        case "native":
            slopes = native.flash_attention_backward
        case "triton":
            from fivefold.kernels.triton import flash_attention_backward as triton

            return triton.flash_attention_backward(*operands, causal, window, scale, softcap)
    return slopes(*operands, causal=causal, window=window, scale=scale, softcap=softcap)


def _backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | float | bool
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_attend = define(
    f"{NAME}(Tensor query, Tensor key, Tensor value, Tensor query_starts, Tensor key_starts, "
    "bool causal, int window, float scale, float softcap) -> (Tensor, Tensor)",
    _compute,
    _shapes,
)
_attend_backward = define(
    f"{NAME}_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor query_starts, Tensor key_starts, bool causal, int window, float scale, float softcap) "
    "-> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _backward_shapes,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 6


differentiate(NAME, _backward, _setup_context)
