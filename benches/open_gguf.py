"""Opening SmolLM2's GGUF file: its header by fivefold and by gguf.GGUFReader, in turn.

python benches/open_gguf.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

from gguf import GGUFReader

from fivefold.weights.gguf_header import read_header
from fivefold.weights.mapped_file import MappedFile
from fivefold.weights.smollm2 import find_smollm2

ROUNDS = 5


def seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def main() -> None:
    path = find_smollm2()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(seconds(lambda: read_header(MappedFile(path))))
        theirs.append(seconds(lambda: GGUFReader(path)))
    print(f"{platform.processor() or platform.machine()}, {path.name}, {ROUNDS} rounds each")
    for name, times in (("fivefold", ours), ("gguf.GGUFReader", theirs)):
        print(f"{name:16} {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    print(f"ratio of medians {statistics.median(theirs) / statistics.median(ours):.0f}")


if __name__ == "__main__":
    main()
