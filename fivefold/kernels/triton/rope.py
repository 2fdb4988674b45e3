"""Rotary position embedding (Su et al. 2021): the halves of each head turned by an angle."""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# B batch, S sequence, H heads, E head_dim, F = E/2 frequencies
import torch
from torch import Tensor

from fivefold.kernels.triton.language import aligned, check, on_device_of, tl, triton

PAIRS_A_PROGRAM = 2048  # heads * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,S,H,E] by angles of [B,S,E/2] fp32 tables (B may be 1); a new tensor in x's dtype.

    Linear in x: the backward pass is `rotate(grad, cos, -sin)`.
    """
    check("rotate", x, cos, sin)
    batch, length, heads, head_dim = x.shape
    x = aligned(x)
    cos, sin = (t.expand(batch, -1, -1) for t in (aligned(cos), aligned(sin)))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    frequencies = triton.next_power_of_2(head_dim // 2)
    block = min(triton.next_power_of_2(heads), max(PAIRS_A_PROGRAM // frequencies, 1))
    if x.numel():
        with on_device_of(x):
            rotate_kernel[(batch * length, triton.cdiv(heads, block))](
                x, cos, sin, y, length, heads, head_dim // 2,
                *x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
                HEADS=block, FREQUENCIES=frequencies,
            )  # fmt: skip
    return y


@triton.jit
def rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    half: tl.tensor,
    x_batch: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    cos_batch: tl.tensor,
    cos_token: tl.tensor,
    sin_batch: tl.tensor,
    sin_token: tl.tensor,
    HEADS: tl.constexpr,
    FREQUENCIES: tl.constexpr,
) -> None:
    """Some heads of one token a program; the token's angles are read once for all of them."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, FREQUENCIES)
    turned = pair < half
    inside = (head < heads)[:, None] & turned[None, :]
    c = tl.load(cos + row * cos_batch + position * cos_token + pair, mask=turned, other=0.0)
    s = tl.load(sin + row * sin_batch + position * sin_token + pair, mask=turned, other=0.0)
    c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
    source = x + row * x_batch + position * x_token + head[:, None] * x_head + pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = y + (token * heads + head[:, None]) * 2 * half + pair[None, :]
    kind = y.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + half, (second * c + first * s).to(kind), mask=inside)
