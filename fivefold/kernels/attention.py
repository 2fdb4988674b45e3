"""Softmax attention over whole tensors: torch's fused kernel where it can, plain matmuls elsewhere."""

from __future__ import annotations

# B batch, H query heads, K key/value heads, Q queries, T keys, E head_dim
import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(query . key * scale)) value, [B,Q,H,E] from [B,Q,H,E] and [B,T,K,E] twice.

    `mask` [B or 1,Q,T] is True where a query may look; `causal` is the mask of Q = T tokens that
    start together, which the fused kernel skips work for. Not both. A query that may look nowhere
    gets zeros. `softcap` c bends scores into c tanh(score / c).
    """
    if softcap is not None:
        return attention_reference(
            query, key, value, mask=mask, causal=causal, scale=scale, softcap=softcap
        )
    fused = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else mask.unsqueeze(1),
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return fused.transpose(1, 2)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The same by matmuls in fp32 (fp64 for fp64 inputs); holds all scores."""
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[2] // key.shape[2]
    key = key.to(wide).repeat_interleave(groups, dim=2)
    value = value.to(wide).repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bthe->bhqt", query.to(wide), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        mask = ones.tril().unsqueeze(0)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # rows that may look nowhere
    return torch.einsum("bhqt,bthe->bqhe", weights, value).to(query.dtype)
