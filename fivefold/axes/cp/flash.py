"""torch's flash attention kernels as blocks: they return log-sum-exp, and take it in backward.

The CPU kernel covers masks, the CUDA one blocks without a mask; neither bends scores. Their own
operators are called, since `scaled_dot_product_attention` keeps log-sum-exp to itself.
"""

from __future__ import annotations

# B batch, H query heads, K key/value heads, Q queries, T keys, E head_dim of queries and keys,
# W head_dim of values
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.axes.cp.block import Rule
from fivefold.kernels.dispatch import low_precision_gemm_is_native

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CUDA_HEAD_DIM = 256
CUDA_MULTIPLE = 8  # the kernel wants head_dim to be a multiple of it


def flash_covers(query: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> bool:
    """Whether a flash kernel computes this block."""
    if rule.softcap is not None:
        return False
    if query.device.type == "cpu":
        return True
    fits = max(query.shape[-1], value.shape[-1]) <= CUDA_HEAD_DIM
    return query.device.type == "cuda" and query.dtype in CUDA_DTYPES and fits and mask is None


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, rule: Rule
) -> tuple[Tensor, Tensor]:
    """As `block.plain_forward`."""
    wide, width = torch.promote_types(query.dtype, torch.float32), value.shape[-1]
    query, key, value = _operands(query, key, value)
    if query.device.type == "cuda":
        result, total = cuda_forward(query, key, value, causal, rule.scale)
        return result[..., :width].to(wide), total.to(wide)
    result, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=_additive(mask, query.dtype), scale=rule.scale
    )
    result, total = result[..., :width].to(wide), total.to(wide)
    if mask is not None:  # the kernel gives a row without a key a log-sum-exp of zero
        empty = ~mask.any(-1).unsqueeze(1)
        total = total.masked_fill(empty, float("-inf"))
        result = result.masked_fill(empty.unsqueeze(-1), 0.0)
    return result, total


def flash_backward(
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
    """As `block.plain_backward`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    dims = (query.shape[-1], key.shape[-1], value.shape[-1])
    query, key, value = _operands(query, key, value)
    grad, result = (_widened(x.to(query.dtype), query.shape[-1]) for x in (grad, result))
    if query.device.type == "cuda":
        grads = cuda_backward(grad, query, key, value, result, total, causal, rule.scale)
    else:
        lse = total if query.dtype == torch.float64 else total.float()
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, result, lse, 0.0, causal,
            attn_mask=_additive(mask, query.dtype), scale=rule.scale,
        )  # fmt: skip
    found = [g[..., :dim].to(wide) for g, dim in zip(grads, dims, strict=True)]
    return found[0], found[1], found[2]


def cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp by the CUDA kernel, of operands as it wants them."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def cuda_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    total: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the CUDA kernel; it draws no random numbers, so it wants no state of them."""
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, result, total.float(), None, None, query.shape[2],
        key.shape[2], 0.0, causal, nothing, nothing, scale=scale,
    )  # fmt: skip


def _operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In a format that the kernel is fast in, and of one head_dim: zeros change no score."""
    device, dtype = query.device.type, query.dtype
    dtype = dtype if low_precision_gemm_is_native(device, dtype) else torch.float32
    width = max(query.shape[-1], value.shape[-1])
    if device == "cuda":
        width = -(-width // CUDA_MULTIPLE) * CUDA_MULTIPLE
    query, key, value = (_widened(x.to(dtype), width) for x in (query, key, value))
    return query, key, value


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[B or 1,1,Q,T]: zero where a query may look, minus infinity elsewhere."""
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, float("-inf")).unsqueeze(1)
