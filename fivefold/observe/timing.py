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
    """Wall seconds of the fastest call, and how many cores the process got over all calls."""

    seconds: float
    cores: float


def best_timing(work: Callable[[], object], device_type: str, budget: float) -> Timing:
    """Call `work` for about `budget` seconds; the fastest of all timings (at least one).

    The minimum is what the machine can do; everything that disturbs it adds.
    """
    once, _ = _time(work, 1, device_type)  # touches pages, fills caches, loads kernels
    repeats = max(1, round(TIMING_SECONDS / max(once, 1e-7)))
    best, wall, cpu = once, 0.0, 0.0
    while not wall or wall + best * repeats < budget - once:
        took, used = _time(work, repeats, device_type)
        wall, cpu = wall + took, cpu + used
        best = min(best, took / repeats)
    return Timing(best, cpu / wall)


def core_seconds(work: Callable[[], object], budget: float) -> float:
    """The least time of one core that `work` takes: what waiting for a core does not lengthen.

    For a machine on which other processes compete; `budget` is of the core's time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()
        best, left = float("inf"), budget
        while left > 0:
            start = time.thread_time()
            work()
            took = time.thread_time() - start
            best, left = min(best, took), left - took
        return best
    finally:
        torch.set_num_threads(threads)


def _time(work: Callable[[], object], repeats: int, device_type: str) -> tuple[float, float]:
    """Wall and CPU seconds of `repeats` calls."""
    _wait(device_type)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    _wait(device_type)
    return time.perf_counter() - wall, time.process_time() - cpu


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()
