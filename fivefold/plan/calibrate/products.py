"""The rate of matrix products by shape and format, through the operators that models run."""

from __future__ import annotations

# M rows of activations, K inputs, N outputs
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Literal

import torch

from fivefold.kernels.linear import linear
from fivefold.kernels.packed_linear import pack_weight, packed_linear
from fivefold.observe.peak import FORMATS
from fivefold.observe.timing import Timing, best_timing
from fivefold.plan.hardware.profile import Gemm

# Rows: of a decode step, of a small batch, of prefills. Matrices: of a small model and a large one.
CPU_ROWS, CPU_MATRICES = (1, 8, 32, 128, 512, 2048), ((576, 1536), (1536, 576), (2048, 2048))
GPU_ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
GPU_MATRICES = ((4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 8192))
COLD_BYTES = 256 * 2**20  # beyond last-level caches
Kind = Literal["training", "inference"]


def measure_products(
    device: str, formats: Sequence[str], budget: float, watch: Callable[[Timing], None]
) -> tuple[Gemm, ...]:
    """Time every shape for about `budget` seconds; `watch` sees each timing.

    A shape that would take longer than ten budgets is left out: formats that are emulated.
    """
    rows, matrices = (
        (CPU_ROWS, CPU_MATRICES) if device == "cpu" else (GPU_ROWS, GPU_MATRICES)
    )  # fmt: skip
    found: list[Gemm] = []
    kinds: tuple[Kind, ...] = ("training", "inference") if device == "cpu" else ("training",)
    for form in formats:
        for kind in kinds:
            for k, n in matrices:
                found += _one_matrix(device, form, kind, rows, k, n, budget, watch)
    return tuple(found)


def _one_matrix(
    device: str, form: str, kind: Kind, rows: Sequence[int], k: int, n: int, budget: float,
    watch: Callable[[Timing], None],
) -> list[Gemm]:  # fmt: skip
    """One matrix [N,K] under more and more rows."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(n, k, device=device, generator=generator).to(FORMATS[form])
    run = _over_packed(weight) if kind == "inference" else lambda x: linear(x, weight)
    found: list[Gemm] = []
    for m in rows:
        if found and found[-1].seconds / found[-1].m * m > 10 * budget:
            break
        x = torch.randn(m, k, device=device, generator=generator).to(FORMATS[form])
        with torch.set_grad_enabled(kind == "training"):
            timing = best_timing(lambda x=x: run(x), device, budget)  # type: ignore[misc]
        watch(timing)
        found.append(Gemm(dtype=form, m=m, k=k, n=n, seconds=timing.seconds, kind=kind))
    return found


def _over_packed(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Products with one packed copy after the other: together they do not fit into a cache, as a
    model's do not, so that each is read from memory.
    """
    copies = max(2, -(-COLD_BYTES // weight.nbytes))
    packed = cycle([pack_weight(weight) for _ in range(copies)])
    return lambda x: packed_linear(x, next(packed))
