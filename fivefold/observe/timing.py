"""The best rate a piece of work reaches, and whether other processes stood in its way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# One timing lasts this long at least: far above the clock's grain and a kernel launch, and short
# enough to fall between two turns of a scheduler that other processes keep busy.
TIMING_SECONDS = 0.005


@dataclass(frozen=True)
class Timing:
    """Wall seconds of one call, and how many cores the process got meanwhile."""

    seconds: float
    cores: float


def best_timing(work: Callable[[], object], device_type: str, budget: float) -> Timing:
    """Call `work` for about `budget` seconds; the fastest of all timings (at least one).

    The minimum is what the machine can do; everything that disturbs it adds.
    """
    once = _time(work, 1, device_type)  # touches pages, fills caches, loads kernels
    repeats = max(1, round(TIMING_SECONDS / max(once.seconds, 1e-7)))
    best = once
    left = budget - once.seconds
    while left > best.seconds * repeats:
        timing = _time(work, repeats, device_type)
        left -= timing.seconds * repeats
        best = min(best, timing, key=lambda t: t.seconds)
    return best


def _time(work: Callable[[], object], repeats: int, device_type: str) -> Timing:
    _wait(device_type)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    _wait(device_type)
    seconds = time.perf_counter() - wall
    return Timing(seconds / repeats, (time.process_time() - cpu) / seconds)


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()
