"""Memory bandwidth, copies between host and device, and what the smallest operator costs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fivefold.observe.timing import Timing, best_timing
from fivefold.plan.hardware.profile import Transfer

CPU_BYTES, GPU_BYTES = 256 * 2**20, 2**31  # far beyond caches
MESSAGES = (2**16, 2**20, 2**24, 2**28)  # between host and device


def measure_transfers(
    device: str, budget: float, watch: Callable[[Timing], None]
) -> tuple[Transfer, ...]:
    """`read` (a sum), `copy` (read and written bytes together), and host copies of a GPU."""
    size = CPU_BYTES if device == "cpu" else GPU_BYTES
    whole = torch.ones(size // 4, device=device)
    half, other = torch.ones(size // 8, device=device), torch.empty(size // 8, device=device)
    vector, matrix = torch.ones(4096, device=device), whole.view(-1, 4096)
    found = []
    for what, moved, run in (
        ("read", size, whole.sum),
        ("read", size, lambda: torch.mv(matrix, vector)),
        ("copy", size, lambda: other.copy_(half)),
    ):
        timing = best_timing(run, device, budget)
        watch(timing)
        found.append(Transfer(what=what, bytes=moved, seconds=timing.seconds))
    return (*found, *(_host_copies(budget) if device == "cuda" else ()))


def _host_copies(budget: float) -> list[Transfer]:
    found = []
    for size in MESSAGES:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
        for what, run in (
            ("host to device", lambda h=host, t=there: t.copy_(h, non_blocking=True)),
            ("device to host", lambda h=host, t=there: h.copy_(t, non_blocking=True)),
        ):
            seconds = best_timing(run, "cuda", budget).seconds  # type: ignore[arg-type]
            found.append(Transfer(what=what, bytes=size, seconds=seconds))
    return found


def measure_launch(device: str, budget: float) -> float:
    """Seconds of an addition to one number: dispatch and launch, no work."""
    one = torch.zeros(1, device=device)
    with torch.no_grad():
        return best_timing(lambda: one.add_(1), device, budget).seconds
