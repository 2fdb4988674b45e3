"""How much memory this process holds, as the kernel and the CUDA allocator count it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

STATUS = Path("/proc/self/status")


def memory_bytes(device_type: str) -> int:
    """The most memory the process has held so far where it computes: what a run needs.

    On CUDA the allocator's peak (tensors, not the context's own few hundred MiB), elsewhere the
    peak resident set. It never falls; a curve that keeps rising is a leak.
    """
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def resident_bytes() -> int:
    """Physical memory the process holds now, shared and memory-mapped pages included."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The largest resident set since the program began.

    Linux' VmHWM, because `ru_maxrss` outlives `exec`: a rank would report the size of the
    launcher it was forked from.
    """
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
