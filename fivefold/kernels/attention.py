"""Softmax attention over whole tensors: torch's fused kernel where it can, plain matmuls elsewhere."""

from __future__ import annotations

# B batch, H query heads, K key/value heads, Q queries, T keys, E head_dim, G dims of values
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.dispatch import low_precision_gemm_is_native


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
    """softmax(cap(query . key * scale)) value: [B,Q,H,E], [B,T,K,E], [B,T,K,G] to [B,Q,H,G].

    `mask` [B or 1,Q,T] is True where a query may look; `causal` is the mask of Q = T tokens that
    start together, which the fused kernel skips work for. Not both. A query that may look nowhere
    gets zeros. `softcap` c bends scores into c tanh(score / c).
    """
    if softcap is not None:
        return attention_reference(
            query, key, value, mask=mask, causal=causal, scale=scale, softcap=softcap
        )
    if query.shape[-1] != value.shape[-1] and query.device.type == "cpu":
        # The fused CPU kernel knows one head_dim; zeros change neither scores nor sums.
        widest = max(query.shape[-1], value.shape[-1])
        padded = attention(
            *(_widen(x, widest) for x in (query, key, value)),
            mask=mask,
            causal=causal,
            scale=scale,
        )
        return padded[..., : value.shape[-1]]
    heads_first = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    mask = None if mask is None else mask.unsqueeze(1)
    if not low_precision_gemm_is_native(query.device.type, query.dtype):
        upcast = _UpcastAttention.apply if torch.is_grad_enabled() else _UpcastAttention.forward
        return upcast(*heads_first, mask, causal, scale)[0].transpose(1, 2)
    fused = F.scaled_dot_product_attention(
        *heads_first,
        attn_mask=mask,
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


class _UpcastAttention(torch.autograd.Function):
    """torch's CPU flash attention in fp32 for low-precision inputs, which are what is saved.

    On CPUs without low-precision matrix instructions its own bf16 backward is 20 times slower.
    Tensors are [B,H,Q,E] and [B,K,T,E]; `mask` [B or 1,1,Q,T].
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide = (query.float(), key.float(), value.float())
        output, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *wide, 0.0, causal, attn_mask=_additive(mask), scale=scale
        )
        return output.to(query.dtype), normaliser

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, mask, ctx.causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, mask, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, normaliser = ctx.saved_tensors
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.float(), query.float(), key.float(), value.float(), output.float(), normaliser,
            0.0, ctx.causal, attn_mask=_additive(mask), scale=ctx.scale,
        )  # fmt: skip
        return *(g.to(query.dtype) for g in grads), None, None, None


def _widen(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _additive(mask: Tensor | None) -> Tensor | None:
    """Where a query may look, as zeros and minus infinities to add to the scores."""
    return None if mask is None else torch.where(mask, 0.0, float("-inf"))
