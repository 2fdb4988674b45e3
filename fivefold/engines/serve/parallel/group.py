"""The process group of an engine's ranks, which are all on this machine."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fivefold.engines.serve.paged.errors import EngineError

HOST = "127.0.0.1"
WAIT = timedelta(seconds=120)
"""For a rank in a collective call, loading included: one that is later counts as lost."""


def open_store(ranks: int) -> dist.TCPStore:
    """Where ranks meet, on a free port. Raises EngineError where this process has a group."""
    if dist.is_initialized():
        raise EngineError(
            "this process is one of a group of ranks already",
            "close the other engine first (LLM.close), or serve in a process of its own",
        )
    return dist.TCPStore(HOST, 0, ranks, is_master=True, wait_for_workers=False, timeout=WAIT)


def join_group(
    device: torch.device, rank: int, ranks: int, port: int, store: dist.TCPStore | None = None
) -> None:
    """Become one of the ranks; returns when all are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = store or dist.TCPStore(HOST, port, ranks, is_master=False, timeout=WAIT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=WAIT)
