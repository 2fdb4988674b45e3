"""The C++ of other CPUs, and under sanitizers: the kernels' own tests over other libraries.

-DFIVEFOLD_LANES=16 runs the code of AVX-512 on narrower CPUs, -DFIVEFOLD_PAIRS its layout of bf16;
the one instruction that multiplies such pairs is emulated there. x86-64 is the oldest CPU of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [
    *(f"test_kernel_{name}.py" for name in ("linear", "cross_entropy", "log_probs", "rms_norm")),
    "test_kernel_head_part.py",
    *(f"test_kernel_{name}.py" for name in ("gated", "rope", "rows", "adamw", "grouped_linear")),
    "test_packed_linear.py", "test_flash_attention.py", "test_paged_attention.py",
    "../serve/test_native_step.py",
]  # fmt: skip
RUN = """
import sys
from pathlib import Path
import pytest
from fivefold.kernels.cpu import build, library
library.use(build.build(Path(sys.argv[1]), flags=tuple(sys.argv[2].split())))
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""
SANITIZERS = "-march=native -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
VARIANTS = {
    "pairs": "-march=native -DFIVEFOLD_PAIRS=1",
    "16 lanes": "-march=native -DFIVEFOLD_LANES=16 -DFIVEFOLD_PAIRS=1",
    "4 lanes": "-march=x86-64",
}


def run(folder: Path, flags: str, **environment: str) -> None:
    present = [str(HERE / name) for name in FILES if (HERE / name).exists()]
    assert len(present) >= 10
    # Not compiling: the compiler's generated code is no business of this test, and slow here.
    arguments = [*present, "-k", "not compile"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), flags, *arguments],
        capture_output=True, text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_code_of_other_cpus(variant: str, tmp_path: Path) -> None:
    run(tmp_path, VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_under_sanitizers(tmp_path: Path) -> None:
    """Reads and writes out of bounds, and what C++ leaves undefined, end the process."""
    found = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    run(
        tmp_path, SANITIZERS, LD_PRELOAD=":".join(found), OMP_NUM_THREADS="2",
        ASAN_OPTIONS="detect_leaks=0",
    )  # fmt: skip
