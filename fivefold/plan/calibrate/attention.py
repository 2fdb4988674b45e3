"""The rate of attention: forward, with backward, and of one query over a cache."""

from __future__ import annotations

# B rows, S sequence, H query heads, K key/value heads, E head_dim
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fivefold.kernels.flash_attention import flash_attention
from fivefold.kernels.paged_attention import paged_attention
from fivefold.observe.peak import FORMATS
from fivefold.observe.timing import Timing, best_timing
from fivefold.plan.hardware.profile import AttentionTime

BLOCK = 32  # tokens of a block of the engine's cache
# batch, heads, key/value heads, sequence, head_dim
CPU_CASES = ((4, 9, 3, 128, 64), (4, 9, 3, 512, 64), (1, 9, 3, 2048, 64))
GPU_CASES = ((4, 32, 8, 1024, 128), (2, 32, 8, 4096, 128), (1, 32, 8, 8192, 128))
CPU_CACHES = ((1, 9, 3, 512, 64), (16, 9, 3, 512, 64), (16, 9, 3, 1024, 64))
GPU_CACHES = ((1, 32, 8, 4096, 128), (16, 32, 8, 4096, 128), (64, 32, 8, 4096, 128))
Case = tuple[int, int, int, int, int]
Kind = Literal["forward", "training", "decode"]


def measure_attention(
    device: str, formats: Sequence[str], budget: float, watch: Callable[[Timing], None]
) -> tuple[AttentionTime, ...]:
    """Time each case for about `budget` seconds; `watch` sees each timing."""
    found = []
    for form in formats:
        for kind, case, run in _cases(device, FORMATS[form]):
            timing = best_timing(run, device, budget)
            watch(timing)
            batch, heads, kv_heads, sequence, head_dim = case
            found.append(
                AttentionTime(
                    dtype=form, batch=batch, heads=heads, kv_heads=kv_heads, sequence=sequence,
                    head_dim=head_dim, kind=kind, seconds=timing.seconds,
                )
            )  # fmt: skip
    return tuple(found)


def _cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Kind, Case, Callable[[], object]]]:
    whole, caches = (CPU_CASES, CPU_CACHES) if device == "cpu" else (GPU_CASES, GPU_CACHES)
    for case in whole:
        yield "forward", case, _forward(case, dtype, device)
        yield "training", case, _training(case, dtype, device)
    for case in caches:
        yield "decode", case, _decode(case, dtype, device)


def _operands(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query [B*S,H,E], key and value [B*S,K,E], and where rows start [B+1]."""
    batch, heads, kv_heads, sequence, head_dim = case
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(batch * sequence, n, head_dim, device=device, generator=generator).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * sequence
    return query, key, value, starts


def _forward(case: Case, dtype: torch.dtype, device: str) -> Callable[[], object]:
    query, key, value, starts = _operands(case, dtype, device)
    scale = case[-1] ** -0.5
    return lambda: flash_attention(query, key, value, starts, starts, causal=True, scale=scale)


def _training(case: Case, dtype: torch.dtype, device: str) -> Callable[[], object]:
    query, key, value, starts = _operands(case, dtype, device)
    scale = case[-1] ** -0.5
    for leaf in (query, key, value):
        leaf.requires_grad_()

    def run() -> None:
        out, _ = flash_attention(query, key, value, starts, starts, causal=True, scale=scale)
        out.backward(out.detach())

    return run


def _decode(case: Case, dtype: torch.dtype, device: str) -> Callable[[], object]:
    batch, heads, kv_heads, held, head_dim = case
    generator = torch.Generator(device).manual_seed(0)
    query = torch.randn(batch, heads, head_dim, device=device, generator=generator).to(dtype)
    shape = (batch * held // BLOCK, BLOCK, kv_heads, head_dim)
    key, value = (
        torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    if device == "cpu":  # keys lie dim by dim in the engine's cache
        key = key.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    table = torch.arange(shape[0], dtype=torch.int32, device=device).view(batch, -1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), held, dtype=torch.int32, device=device)
    scale = head_dim**-0.5

    @torch.no_grad()
    def run() -> object:
        return paged_attention(query, key, value, table, starts, lengths, scale=scale)

    return run
