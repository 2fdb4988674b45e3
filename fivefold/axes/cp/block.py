"""Attention of some queries on some keys, with what it takes to join it to that on other keys.

Forward returns log-sum-exp of the scores beside the result; backward takes that of ALL keys, so
that exp(score - log-sum-exp) is the true weight of a key whatever block it is in (Dao et al.
2022). torch's flash kernels where they cover a block, matmuls over tiles of queries elsewhere.
"""

from __future__ import annotations

# B batch, H query heads, K key/value heads, G query heads of one key head, Q queries, T keys,
# E head_dim of queries and keys, W head_dim of values
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 2**24  # scores that the matmuls hold at a time


@dataclass(frozen=True)
class Rule:
    """What is the same for every block of a layer. `softcap` c bends scores to c tanh(score / c)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, rule: Rule
) -> tuple[Tensor, Tensor]:
    """[B,H,Q,W] and log-sum-exp [B,H,Q] in fp32 (fp64 for fp64) of [B,H,Q,E], [B,K,T,E], [B,K,T,W].

    `mask` [B or 1,Q,T] is True where a query may look; one that may look nowhere gets zeros and
    minus infinity. `causal`: queries and keys are the same tokens.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = key.to(wide), value.to(wide)
    results, sums = [], []
    for rows in _tiles(query, key):
        scores, _ = _scores(query[:, :, rows].to(wide), key, _seen(mask, causal, rows, key), rule)
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(total).unsqueeze(-1))
        results.append((weights.flatten(2, 3) @ value).view(*query[:, :, rows].shape[:3], -1))
        sums.append(total.flatten(1, 2))
    return torch.cat(results, dim=2), torch.cat(sums, dim=2)


def plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    total: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of query, key and value, in fp32 (fp64 for fp64).

    `grad` and `result` [B,H,Q,W], `total` [B,H,Q]: of the queries' attention to ALL keys.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    key, value = key.to(wide), value.to(wide)
    key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
    query_grads = []
    for rows in _tiles(query, key):
        tile = query[:, :, rows].to(wide)
        grouped = (tile.shape[0], kv_heads, groups, tile.shape[2])
        scores, slope = _scores(tile, key, _seen(mask, causal, rows, key), rule)
        weights = torch.exp(scores - total[:, :, rows].reshape(grouped).unsqueeze(-1)).flatten(2, 3)
        above = grad[:, :, rows].to(wide)
        shift = (above * result[:, :, rows].to(wide)).sum(-1).reshape(*grouped[:2], -1, 1)
        above = above.reshape(*grouped[:2], -1, value.shape[-1])
        value_grad += weights.transpose(-1, -2) @ above
        bent = weights * (above @ value.transpose(-1, -2) - shift) * rule.scale
        bent = bent if slope is None else bent * slope.flatten(2, 3)
        query_grads.append((bent @ key).view(tile.shape))
        key_grad += bent.transpose(-1, -2) @ tile.reshape(*grouped[:2], -1, key.shape[-1])
    return torch.cat(query_grads, dim=2), key_grad, value_grad


def _scores(
    query: Tensor, key: Tensor, seen: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Scores [B,K,G,Q,T], and what a softcap multiplies their gradient with."""
    batch, heads, rows, _ = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, -1)
    scores = (grouped @ key.transpose(-1, -2)) * rule.scale
    scores = scores.view(batch, kv_heads, heads // kv_heads, rows, -1)
    slope = None
    if rule.softcap is not None:
        bent = torch.tanh(scores / rule.softcap)
        scores, slope = bent * rule.softcap, 1 - bent * bent
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    return scores, slope


def _tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Rows of queries, few enough at a time for their scores to fit."""
    batch, heads, rows, _ = query.shape
    step = max(1, TILE // (batch * heads * key.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _seen(mask: Tensor | None, causal: bool, rows: slice, key: Tensor) -> Tensor | None:
    """The rows of the mask, which causality is one of."""
    if causal:
        places = torch.arange(key.shape[2], device=key.device)
        return (places[rows].unsqueeze(-1) >= places).unsqueeze(0)
    return None if mask is None else mask[:, rows]


def _finite(total: Tensor) -> Tensor:
    """Zeros for rows without a key, so that their weights are zeros; NaN stays NaN."""
    return total.masked_fill(total == float("-inf"), 0.0)
