"""Attention of one new token a row over what its row holds: the decode step's attention."""

from __future__ import annotations

# B batch, H query heads, K key/value heads, G = H/K queries that share a key head, T keys, E head_dim
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.attention import attention_reference


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """[B,H,E] over [B,T,K,E] twice -> [B,H,E]; `mask` [B,T] is True where a row may look.

    The G queries of a key head go to the fused kernel as G rows of one head, so that keys and
    values are read once and the products are matrices. (One query a head is 4 times slower in
    bf16 on AVX2, whose one-row products fall to scalar code.)
    """
    if softcap is not None:
        return decode_attention_reference(
            query, key, value, mask=mask, scale=scale, softcap=softcap
        )
    batch, heads, head_dim = query.shape
    attended = F.scaled_dot_product_attention(
        query.view(batch, key.shape[2], -1, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None, None, :],
        scale=scale,
    )
    return attended.reshape(batch, heads, head_dim)


def decode_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The same by the plain reference of many queries."""
    attended = attention_reference(
        query[:, None],
        key,
        value,
        mask=None if mask is None else mask[:, None],
        causal=False,
        scale=scale,
        softcap=softcap,
    )
    return attended[:, 0]
