"""What is measured of the operators: operands of one model's sizes, and what must move or be done.

A case knows the operator's arithmetic and the bytes it cannot avoid; the larger of arithmetic over
the GEMM peak and bytes over the memory bandwidth is the least time it can take.
"""

from __future__ import annotations

# N tokens, D hidden, F feed-forward, H query heads, K key/value heads, E head_dim, V vocabulary
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.adamw import adamw_
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.dispatch import low_precision_gemm_is_native
from fivefold.kernels.flash_attention import flash_attention
from fivefold.kernels.gated import gated
from fivefold.kernels.grouped_linear import grouped_linear
from fivefold.kernels.linear import linear
from fivefold.kernels.packed_linear import pack_int8, pack_weight, packed_linear
from fivefold.kernels.paged_attention import paged_attention
from fivefold.kernels.rms_norm import rms_norm
from fivefold.kernels.rope import apply_rope

Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """A model's, and of what it is given. The default is SmolLM2-135M on 4 x 512 tokens."""

    batch: int = 4
    length: int = 512
    hidden: int = 576
    feed_forward: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocabulary: int = 49152
    experts: int = 8
    held: int = 1024  # tokens in the cache of each row that decodes

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.length


@dataclass(frozen=True)
class Case:
    """One operator on some operands; `run` and `peer` make and time nothing before they are called.

    op: its name in `dispatch`. peer: the same by torch's own operators, None where torch has none.
    """

    op: str
    what: str
    dtype: torch.dtype
    flops: float
    nbytes: float
    run: Run = field(repr=False)
    peer: Run | None = field(repr=False, default=None)


# What torch computes by scalar loops in formats without instructions: minutes for these sizes.
SLOW_PEERS = frozenset({"linear", "grouped_linear", "flash_attention", "cross_entropy"})


def cases(sizes: Sizes, dtype: torch.dtype, device: str, ops: Collection[str]) -> Iterator[Case]:
    """Those of `ops`, made when it is their turn: the memory of one is free for the next.

    Without a peer where torch's own would take minutes.
    """
    slow = SLOW_PEERS if not low_precision_gemm_is_native(device, dtype) else frozenset()
    for op, makers in OPERATORS.items():
        if op in ops:
            for make in makers:
                for case in make(sizes, dtype, device):
                    yield replace(case, peer=None) if op in slow else case


def _linear(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    n, d, f = sizes.tokens, sizes.hidden, sizes.feed_forward
    x, weight = _random(n, d, dtype=dtype, device=device), _random(f, d, dtype=dtype, device=device)
    yield Case(
        "linear", f"{n} x {d} x {f}", dtype, 2.0 * n * d * f,
        _bytes(x, weight) + n * f * x.itemsize,
        lambda: linear(x, weight), lambda: F.linear(x, weight),
    )  # fmt: skip


def _packed(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    d, f = sizes.hidden, sizes.feed_forward
    weight = _random(f, d, dtype=dtype, device=device)
    packed = pack_weight(weight)
    for rows in (1, 8, 32):
        x = _random(rows, d, dtype=dtype, device=device)
        yield Case(
            "packed_linear", f"{rows} x {d} x {f}", dtype, 2.0 * rows * d * f,
            packed.nbytes + _bytes(x), lambda x=x: packed_linear(x, packed),  # type: ignore[misc]
            lambda x=x: F.linear(x, weight),  # type: ignore[misc]
        )  # fmt: skip


def _int8(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    d, f = sizes.hidden, sizes.feed_forward
    weight = _random(f, d, dtype=dtype, device=device)
    packed = pack_int8(weight, dtype)
    for rows in (1, 32):
        x = _random(rows, d, dtype=dtype, device=device)
        yield Case(
            "packed_linear", f"int8 {rows} x {d} x {f}", dtype, 2.0 * rows * d * f,
            packed.nbytes + _bytes(x), lambda x=x: packed_linear(x, packed),  # type: ignore[misc]
            lambda x=x: F.linear(x, weight),  # type: ignore[misc]
        )  # fmt: skip


def _grouped(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    n, d, f, experts = sizes.tokens, sizes.hidden, sizes.feed_forward, sizes.experts
    x = _random(n, d, dtype=dtype, device=device)
    weight = _random(experts, f, d, dtype=dtype, device=device)
    counts = torch.full((experts,), n // experts, device=device)
    yield Case(
        "grouped_linear", f"{experts} of {n // experts} x {d} x {f}", dtype,
        2.0 * n * d * f, _bytes(x, weight) + n * f * x.itemsize,
        lambda: grouped_linear(x, weight, counts),
        lambda: [F.linear(rows, w) for rows, w in zip(x.chunk(experts), weight, strict=True)],
    )  # fmt: skip


def _heads(sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    shape = (sizes.tokens, -1, sizes.head_dim)
    rows = [sizes.tokens * heads for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    made = [_random(n, sizes.head_dim, dtype=dtype, device=device).view(shape) for n in rows]
    return made[0], made[1], made[2]


def _starts(sizes: Sizes, device: str) -> Tensor:
    return torch.arange(sizes.batch + 1, dtype=torch.int32, device=device) * sizes.length


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, sizes: Sizes, scale: float
) -> Tensor:
    rows = (sizes.batch, sizes.length, -1, sizes.head_dim)
    q, k, v = (x.view(rows).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _attention(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    query, key, value = _heads(sizes, dtype, device)
    starts, scale = _starts(sizes, device), sizes.head_dim**-0.5
    yield Case(
        "flash_attention", f"forward {sizes.batch} x {sizes.length}", dtype,
        _attention_flops(sizes), _bytes(query, query, key, value),
        lambda: flash_attention(query, key, value, starts, starts, causal=True, scale=scale),
        lambda: _torch_attention(query, key, value, sizes, scale),
    )  # fmt: skip


def _attention_step(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    query, key, value = (x.requires_grad_() for x in _heads(sizes, dtype, device))
    starts, scale = _starts(sizes, device), sizes.head_dim**-0.5

    def ours() -> None:
        out, _ = flash_attention(query, key, value, starts, starts, causal=True, scale=scale)
        out.backward(out.detach())

    def theirs() -> None:
        out = _torch_attention(query, key, value, sizes, scale)
        out.backward(out.detach())

    yield Case(
        "flash_attention", "with backward", dtype,
        3.5 * _attention_flops(sizes), 3 * _bytes(query, query, key, value), ours, theirs,
    )  # fmt: skip


def _attention_flops(sizes: Sizes) -> float:
    """Of the half that causality leaves: scores and weighted values (backward has five products)."""
    return 2.0 * sizes.tokens * sizes.length * sizes.heads * sizes.head_dim


def _decode(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    batch, held, block = 16, sizes.held, 16
    query = _random(batch * sizes.heads, sizes.head_dim, dtype=dtype, device=device)
    query = query.view(batch, sizes.heads, sizes.head_dim)
    shape = (batch * held // block, block, sizes.kv_heads, sizes.head_dim)
    count = shape[0] * block * sizes.kv_heads
    key, value = (
        _random(count, sizes.head_dim, dtype=dtype, device=device).view(shape) for _ in range(2)
    )
    blocks = torch.arange(shape[0], dtype=torch.int32, device=device).view(batch, -1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), held, dtype=torch.int32, device=device)
    scale = sizes.head_dim**-0.5
    rows = (batch, held, sizes.kv_heads, sizes.head_dim)
    grouped = query.view(batch, sizes.kv_heads, -1, sizes.head_dim)
    k, v = (x.view(rows).transpose(1, 2) for x in (key, value))
    yield Case(
        "paged_attention", f"{batch} rows over {held}", dtype,
        4.0 * batch * held * sizes.heads * sizes.head_dim, _bytes(key, value),
        lambda: paged_attention(query, key, value, blocks, starts, lengths, scale=scale),
        lambda: F.scaled_dot_product_attention(grouped, k, v, scale=scale),
    )  # fmt: skip


def _loss(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    n, d, v = sizes.tokens, sizes.hidden, sizes.vocabulary
    hidden = _random(n, d, dtype=dtype, device=device).requires_grad_()
    weight = _random(v, d, dtype=dtype, device=device).mul_(0.05).requires_grad_()
    labels = torch.randint(0, v, (n,), device=device)

    def theirs() -> None:
        F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()

    yield Case(
        "cross_entropy", f"{n} x {v} with backward", dtype, 6.0 * n * d * v,
        2 * _bytes(hidden, weight),
        lambda: linear_cross_entropy(hidden, weight, labels, chunk=256).backward(), theirs,
    )  # fmt: skip


def _norm(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    x = _random(sizes.tokens, sizes.hidden, dtype=dtype, device=device)
    weight = torch.ones(sizes.hidden, dtype=dtype, device=device)
    shape = list(weight.shape)
    yield Case(
        "rms_norm", f"{sizes.tokens} x {sizes.hidden}", dtype, 0.0, 2 * _bytes(x),
        lambda: rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, shape, weight, 1e-5),
    )  # fmt: skip


def _gates(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    shape = (sizes.tokens, sizes.feed_forward)
    gate, up = (_random(*shape, dtype=dtype, device=device) for _ in range(2))
    yield Case(
        "gated", f"SwiGLU {shape[0]} x {shape[1]}", dtype, 0.0, 3 * _bytes(gate),
        lambda: gated(gate, up, "silu"), lambda: F.silu(gate) * up,
    )  # fmt: skip


def _rotation(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    x = _heads(sizes, dtype, device)[0].view(sizes.batch, sizes.length, -1, sizes.head_dim)
    angles = torch.rand(sizes.batch, sizes.length, sizes.head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat((t, t), -1).unsqueeze(2).to(dtype) for t in (cos, sin))

    def theirs() -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * wide_cos + torch.cat((-second, first), dim=-1) * wide_sin

    yield Case(
        "rope", f"{sizes.tokens} x {sizes.heads} x {sizes.head_dim}", dtype, 0.0, 2 * _bytes(x),
        lambda: apply_rope(x, cos, sin), theirs,
    )  # fmt: skip


def _optimizer(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Case]:
    count = 2**24
    value, grad, first, second = (torch.rand(count, device=device) for _ in range(4))
    theirs = torch.optim.AdamW([value], lr=1e-4, fused=True)
    value.grad = grad
    yield Case(
        "adamw", f"{count // 2**20} Mi values", torch.float32, 0.0, 7.0 * _bytes(value),
        lambda: adamw_(
            value, grad, first, second, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8,
            weight_decay=0.1, step=3,
        ),
        theirs.step,
    )  # fmt: skip


def _random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _bytes(*tensors: Tensor) -> float:
    return float(sum(t.nbytes for t in tensors))


# By the name that `dispatch` knows each by.
OPERATORS: dict[str, tuple[Callable[[Sizes, torch.dtype, str], Iterator[Case]], ...]] = {
    "linear": (_linear,),
    "packed_linear": (_packed, _int8),
    "grouped_linear": (_grouped,),
    "flash_attention": (_attention, _attention_step),
    "paged_attention": (_decode,),
    "cross_entropy": (_loss,),
    "rms_norm": (_norm,),
    "gated": (_gates,),
    "rope": (_rotation,),
    "adamw": (_optimizer,),
}
