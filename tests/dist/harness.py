"""Gloo workers that start once per world size and run many cases."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_SECONDS = 120
CASES_A_START = 32  # groups that cases made keep threads: they end with their process
CASE_SECONDS = 120
CALLS = 12  # of a stack, innermost first
PRELOADED = [
    "tests.dist.cases",
    "tests.dist.compression_cases",
    "tests.dist.context_cases",
    "tests.dist.expert_cases",
    "tests.dist.kernel_cases",
    "tests.dist.pipeline_cases",
    "tests.dist.serving_cases",
    "tests.parity.lattice.reshard",
]
GRACE_SECONDS = 3  # for the peers of a rank that failed: most are stuck waiting for it


class WorkerError(AssertionError):
    """A case failed on some rank; carries that rank's traceback."""


class Workers:
    """`run(f, *args)` calls `f(*args)` on every rank and returns what each gave, by rank.

    One worker has no process group, as a run on one rank has none. A case is named by its module
    and not pickled itself, so its module must be importable.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._cases = 0

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = CASE_SECONDS) -> list[Any]:
        """Raises WorkerError with the traceback of the rank that failed first; starts afresh next time."""
        if self._cases == CASES_A_START:
            self.stop()
        if not self._processes:
            self._start()
        self._cases += 1
        for pipe in self._pipes:
            pipe.send((case.__module__, case.__qualname__, args))
        return self._collect(timeout)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for process in self._processes:
            stack_file(process.pid).unlink(missing_ok=True)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._cases = [], [], 0

    def _collect(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: list[str] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    fine, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    fine, value = False, f"rank {rank} died"
                if fine:
                    answers[rank] = value
                else:
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not errors:
            errors.append(f"rank {sorted(waiting.values())} gave no answer in {timeout} s")
            errors += [self._whereabouts(rank) for rank in sorted(waiting.values())]
        if errors:
            self.stop()
            raise WorkerError("\n".join(errors))
        return [answers[rank] for rank in range(self.world_size)]

    def _whereabouts(self, rank: int) -> str:
        """What a rank is doing: its innermost calls, the collective it waits in among them."""
        process, place = self._processes[rank], stack_file(self._processes[rank].pid)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not (place.exists() and place.stat().st_size):
            process.join(0.05)
        lines = place.read_text().splitlines() if place.exists() else []
        calls = [line.strip() for line in lines if line.strip().startswith("File")]
        return f"rank {rank} is in:\n  " + "\n  ".join(calls[:CALLS] or ["(no answer)"])

    def _start(self) -> None:
        # Workers fork from a server that has imported what they need, and has done nothing else.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def stack_file(pid: int) -> Path:
    """Where the process `pid` writes its stack when it is sent SIGUSR1."""
    return Path(tempfile.gettempdir()) / f"fivefold-test-stack-{pid}"


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    stack = stack_file(os.getpid()).open("w")
    atexit.register(stack_file(os.getpid()).unlink, missing_ok=True)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=START_SECONDS),
        )
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            case = getattr(importlib.import_module(module), name)
            pipe.send((True, case(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
