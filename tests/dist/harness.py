"""Gloo workers that start once per world size and run many cases."""

from __future__ import annotations

import importlib
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CASE_SECONDS = 120


class WorkerError(AssertionError):
    """A case failed on some rank; carries that rank's traceback."""


class Workers:
    """`run(f, *args)` calls `f(*args)` on every rank and returns what each gave."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._start()

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = CASE_SECONDS) -> list[Any]:
        """Raises WorkerError with the first failing rank's traceback, and starts afresh after."""
        for pipe in self._pipes:
            pipe.send((case.__module__, case.__qualname__, args))
        answers: list[Any] = []
        errors: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout if not errors else 5):
                errors.append(f"rank {rank} gave no answer within {timeout} s (a hang)")
                continue
            try:
                fine, value = pipe.recv()
            except EOFError:
                errors.append(f"rank {rank} died")
                continue
            (answers if fine else errors).append(value)
        if errors:
            self.stop()
            self._start()
            # The rank whose peers merely lost it says less than the one that failed first.
            errors.sort(key=lambda e: "Connection closed" in e or "gave no answer" in e)
            raise WorkerError("\n".join(errors))
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
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


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            case = getattr(importlib.import_module(module), name)
            pipe.send((True, case(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
