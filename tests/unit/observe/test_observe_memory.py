"""Memory as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from fivefold.observe.memory import peak_resident_bytes

BLOCK = 96 * 2**20
ROUNDING = 2 * 2**20  # the kernel counts pages for each thread, and adds them up now and then


GROW = f"""
import numpy as np
from fivefold.observe.memory import memory_bytes, resident_bytes
before = memory_bytes("cpu")
block = np.ones({BLOCK}, np.uint8)
during = memory_bytes("cpu")
assert during - before > 0.9 * {BLOCK}, (before, during)
assert resident_bytes() > 0.9 * {BLOCK}
del block
assert memory_bytes("cpu") >= during - {ROUNDING}
assert resident_bytes() < during
"""


def test_the_peak_follows_an_allocation_and_stays() -> None:
    """In a process of its own: what earlier tests mapped here comes and goes with the page cache."""
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_child_does_not_report_its_parents_size() -> None:
    """`ru_maxrss` would: it is carried through fork and exec."""
    block = np.ones(600 * 2**20, np.uint8)
    code = "from fivefold.observe.memory import peak_resident_bytes as p; print(p())"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(printed.stdout) < block.size < peak_resident_bytes()
