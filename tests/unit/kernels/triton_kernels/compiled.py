"""A child process that compiles Triton kernels for Hopper, where no GPU is. Nothing runs on one.

Triton is told that a Hopper GPU is the current device, and each launch stops after the compiler: so
types, constants, alignment, warps and stages are those of a real launch of the same function.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

HOPPER = 90
Call = tuple[str, str, tuple[Any, ...]]  # module, function, arguments


class Compiled(NamedTuple):
    """What a kernel needs, known without running it."""

    name: str
    shared: int  # bytes of shared memory
    tensor_cores: bool
    instructions: int  # of PTX


def compile_calls(calls: Sequence[Call], cache: str) -> list[list[Compiled]]:
    """The kernels that each call launches, compiled in a process of its own into folder `cache`."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, calls, cache), daemon=True)
    process.start()
    theirs.close()
    try:
        fine, value = ours.recv()
    except EOFError:
        fine, value = False, "the compiling process died"
    finally:
        process.kill()
        process.join()
    if not fine:
        raise AssertionError(value)
    return value


def serve(pipe: Connection, calls: Sequence[Call], cache: str) -> None:
    """The child."""
    assert "triton" not in sys.modules
    torch.set_num_threads(1)
    try:
        pipe.send((True, [kernels_of(call, cache) for call in calls]))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def kernels_of(call: Call, cache: str) -> list[Compiled]:
    """Every kernel that one call would launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    triton.knobs.cache.dir = cache
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", HOPPER, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    found: list[Compiled] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = launch(kernel, *args, grid=grid, warmup=True, **options)
        text = made.asm["ptx"]
        found.append(
            Compiled(
                kernel.__name__,
                made.metadata.shared,
                bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)", text)),
                text.count(";"),
            )
        )

    module, function, args = call
    loaded = importlib.import_module(f"fivefold.kernels.triton.{module}")
    loaded.check = lambda *_: None  # the tensors are not on a GPU; nor is anything read
    JITFunction.run = compile_only
    try:
        getattr(loaded, function)(*args)
    finally:
        JITFunction.run = launch
    return found
