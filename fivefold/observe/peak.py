"""The matrix-product rate and memory bandwidth this machine reaches: what shares are shares of.

Measured in under three seconds the first time, then read from the user's cache folder. A data
sheet's figure would be of another clock, core count and library.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fivefold.core.errors import ConfigError, nearest
from fivefold.observe.hardware import device_name, usable_cores
from fivefold.observe.measurement_cache import remembered
from fivefold.observe.timing import Timing, best_timing, core_seconds

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMM_SECONDS = 0.8  # for one number format
BANDWIDTH_SECONDS = 0.3  # for each way to read
# M, K, N of [M, K] x [K, N], smallest first: a size is left out when the rate so far says that
# it would take too long (bf16 on a CPU without it). Libraries differ in which one they like.
CPU_SIZES = ((128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (2048, 512, 2048), (2048,) * 3)
GPU_SIZES = ((1024,) * 3, (4096,) * 3, (8192, 4096, 8192), (8192,) * 3)
# Far beyond a last-level cache, or the reads would be of that.
CPU_BYTES, GPU_BYTES = 512 * 2**20, 2 * 2**30
ESTIMATE_SIZE, ESTIMATE_SECONDS = 384, 0.15
UNDISTURBED = 0.85  # share of its cores that a process gets while nothing else runs


@dataclass(frozen=True)
class Peak:
    """The highest rate of matrix products in one number format."""

    flops_per_second: float
    dtype: str  # the format asked for: fp32, bf16, fp16
    reached_in: str  # the format that reached it: fp32 where the lower one is slower
    measured_on: str
    threads: int
    torch_version: str
    disturbed: bool  # other processes took cores meanwhile: an estimate, and not kept


@dataclass(frozen=True)
class Bandwidth:
    """The highest rate at which memory beyond the caches is read."""

    bytes_per_second: float
    measured_on: str
    threads: int
    torch_version: str
    disturbed: bool


def measured_peak(device_type: str, dtype: str) -> Peak:
    """GEMM peak of one device (`cpu`: this process's threads), measured once.

    For bf16 and fp16 it is the higher of that format's rate and fp32's: without instructions for
    a format libraries emulate it, slower than a program that computes in fp32 instead needs to
    be. Leaves torch's generators alone. Raises ConfigError for an unknown format.
    """
    if dtype not in FORMATS:
        raise ConfigError(f"no peak for number format {dtype!r}", nearest(dtype, FORMATS))
    key = _key("gemm", device_type) | {"dtype": dtype}
    found = remembered(key, lambda: _measure_gemm(device_type, dtype), worth_keeping=_undisturbed)
    own = Peak(**found)
    if dtype == "fp32":
        return own
    full = measured_peak(device_type, "fp32")
    if full.flops_per_second <= own.flops_per_second:
        return own
    return Peak(**(asdict(full) | {"dtype": dtype}))


def measured_bandwidth(device_type: str = "cpu") -> Bandwidth:
    """Read bandwidth of one device's memory (`cpu`: with this process's threads), measured once."""
    key = _key("bandwidth", device_type)
    found = remembered(key, lambda: _measure_reads(device_type), worth_keeping=_undisturbed)
    return Bandwidth(**found)


def _key(what: str, device_type: str) -> dict[str, Any]:
    """Everything that a measurement holds for."""
    return {
        "what": what,
        "device": device_name(device_type),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fp32_products": torch.get_float32_matmul_precision(),
    }


def _undisturbed(found: dict[str, Any]) -> bool:
    return not found["disturbed"]


def _origin(device_type: str, best: Timing) -> dict[str, Any]:
    cores = min(torch.get_num_threads(), usable_cores())
    return {
        "measured_on": device_name(device_type),
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
        "disturbed": device_type == "cpu" and best.cores < UNDISTURBED * cores,
    }


@torch.no_grad()
def _measure_gemm(device_type: str, dtype: str) -> dict[str, Any]:
    """Best of sizes and of both layouts of the right operand: `x @ w` and F.linear's `x @ w.T`."""
    rate, best = 0.0, Timing(float("inf"), 0.0)
    left = GEMM_SECONDS
    sizes = CPU_SIZES if device_type == "cpu" else GPU_SIZES
    for position, (m, k, n) in enumerate(sizes):
        flops = 2 * m * k * n
        budget = left / (len(sizes) - position)
        # Four calls: warm-up and one timing in each layout.
        if rate and 4 * flops / rate > left:
            break
        left_operand = _values((m, k), device_type, dtype)
        right_operand = _values((n, k), device_type, dtype)
        transposed = right_operand.T.contiguous()
        for work in (
            lambda x=left_operand, w=right_operand: functional.linear(x, w),
            lambda x=left_operand, w=transposed: torch.mm(x, w),
        ):
            timing = best_timing(work, device_type, budget / 2)
            left -= budget / 2
            if flops / timing.seconds > rate:
                rate, best = flops / timing.seconds, timing
    origin = _origin(device_type, best)
    if origin["disturbed"]:
        rate = max(rate, _estimate_gemm(dtype))
    return {"flops_per_second": rate, "dtype": dtype, "reached_in": dtype, **origin}


def _estimate_gemm(dtype: str) -> float:
    """One core's rate in the time it was given, times the cores: on a busy machine, where wall
    time says more of the other processes than of this one.
    """
    x, w = (_values((ESTIMATE_SIZE, ESTIMATE_SIZE), "cpu", dtype) for _ in range(2))
    seconds = core_seconds(lambda: functional.linear(x, w), ESTIMATE_SECONDS)
    cores = min(torch.get_num_threads(), usable_cores())
    return cores * 2 * ESTIMATE_SIZE**3 / seconds


@torch.no_grad()
def _measure_reads(device_type: str) -> dict[str, Any]:
    """Best of a plain sum and of a matrix-vector product, which is how decoding reads weights."""
    size = CPU_BYTES if device_type == "cpu" else GPU_BYTES
    weights = torch.ones(size // 4 // 4096, 4096, device=device_type)
    vector = torch.ones(4096, device=device_type)
    timings = [
        best_timing(work, device_type, BANDWIDTH_SECONDS)
        for work in (weights.sum, lambda: torch.mv(weights, vector))
    ]
    best = min(timings, key=lambda timing: timing.seconds)
    return {"bytes_per_second": size / best.seconds, **_origin(device_type, best)}


def _values(shape: tuple[int, int], device_type: str, dtype: str) -> Tensor:
    """Random numbers, as a GPU draws less power and clocks higher on constants."""
    # A generator of its own: a run that measures must go on like one that finds the cache.
    generator = torch.Generator(device_type).manual_seed(0)
    empty = torch.empty(shape, device=device_type, dtype=torch.float32)
    return empty.uniform_(-1, 1, generator=generator).to(FORMATS[dtype])
