"""A child process that runs Triton kernels in Triton's interpreter: nothing here runs on a GPU.

Triton reads TRITON_INTERPRET as it is imported and once more as each kernel is decorated, its own
library's too. A process that set it would hand interpreted functions to torch.compile ever after,
so the variable lives and dies in a process of its own. Tensors travel as shared memory: strides are
kept, and what a kernel writes in place the test sees.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

ANSWER_SECONDS = 240


class Interpreter:
    """`call("rope", "rotate", x, cos, sin)` runs that function of fivefold.kernels.triton."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, module: str, function: str, *args: Any, **options: Any) -> Any:
        """What the function returns; an AssertionError with its traceback if it raised."""
        self._pipe.send((module, function, args, options))
        try:
            if not self._pipe.poll(ANSWER_SECONDS):
                raise EOFError
            fine, value = self._pipe.recv()
        except EOFError:
            self.stop()
            self._start()  # a late answer must not be taken for the next call's
            raise AssertionError(f"{module}.{function} gave no answer") from None
        if not fine:
            raise AssertionError(value)
        return value

    def stop(self) -> None:
        """Nothing is kept in the process that would be worth its end in order."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def serve(pipe: Connection) -> None:
    """The child: calls until the pipe closes."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # Makes torch.empty give NaN: what a kernel fails to write is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    from interpreter_repairs import repair

    repair()
    while True:
        try:
            module, function, args, options = pipe.recv()
        except EOFError:
            return
        try:
            loaded = importlib.import_module(f"fivefold.kernels.triton.{module}")
            pipe.send((True, getattr(loaded, function)(*args, **options)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
