"""What every rank sets up before any work: threads, device, process group, mesh, determinism."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fivefold.axes.mesh import Mesh, build_mesh
from fivefold.core.environment import Ranks, read_ranks, under_torchrun
from fivefold.core.errors import FivefoldError, TrainingError
from fivefold.core.layout import Layout

PR_SET_PDEATHSIG = 1  # linux/prctl.h
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
T = TypeVar("T")
# How gloo and NCCL say that the other end of a connection is gone.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)


@dataclass(frozen=True)
class Process:
    """This rank's place: who it is, where it computes, and its mesh (None when alone)."""

    ranks: Ranks
    device: torch.device
    mesh: Mesh | None

    @property
    def data_rank(self) -> tuple[int, int]:
        """(index, count) among the ranks that read different sequences."""
        return (0, 1) if self.mesh is None else self.mesh.place(("dp_replicate", "dp_shard"))

    def on_main(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone; every rank gets its result, or raises its FivefoldError."""
        if self.ranks.world_size == 1:
            return work()
        box: list[object] = [None, None]
        if self.ranks.is_main:
            try:
                box[0] = work()
            except FivefoldError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[1], FivefoldError):
            raise box[1]
        return box[0]  # type: ignore[return-value]


@contextmanager
def start_process(layout: Layout) -> Iterator[Process]:
    """Enter the process group that torchrun prepared (none for one rank) and leave it after."""
    ranks = read_ranks()
    if under_torchrun():
        die_with_parent()
    device = _choose_device(ranks)
    if device.type == "cpu":
        # torchrun sets one thread a process when nobody chose; share the cores evenly instead.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    if ranks.world_size == 1:
        yield Process(ranks, device, None)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Process(ranks, device, build_mesh(layout, device.type))
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST_PEER):
            raise
        raise TrainingError(
            f"rank {ranks.rank} lost contact with another rank", "see what ended that one"
        ) from error
    # Not after an error: the peers may be gone, and tearing down would wait for them.
    dist.destroy_process_group()


def seed_everything(seed: int, rank: int, deterministic: bool) -> None:
    """Seed this rank's generators; `deterministic` refuses operators that are not."""
    torch.manual_seed(seed * 65_537 + rank)
    if deterministic:
        # cuBLAS reads this when it starts; without it, it refuses to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Filling fresh buffers with NaN is for finding reads of unwritten memory, not for running.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this rank when the agent that started it is gone.

    The agent puts ranks in sessions of their own: after a `kill -9` of the agent they would go
    on, and write into the run directory that its successor resumes.
    """
    if sys.platform != "linux":
        return
    agent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it died before the request stood
        os.kill(os.getpid(), signal.SIGKILL)


def _choose_device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device
