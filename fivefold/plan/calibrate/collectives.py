"""Collectives between processes of this host: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fivefold.core.errors import PlanError, one_line
from fivefold.plan.hardware.profile import CollectiveTime

CPU_BYTES, GPU_BYTES = (2**12, 2**16, 2**20, 2**24), (2**12, 2**16, 2**20, 2**24, 2**28)
OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
ROUNDS = 3  # of which the fastest counts
DEADLINE = 300.0  # seconds for one group


def group_sizes(device: str) -> tuple[int, ...]:
    """Powers of two from 2 to the GPUs (or cores) that there are; none of a single one."""
    most = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    return tuple(2**n for n in range(1, 10) if 2**n <= most)


def measure_collectives(
    device: str, ranks: int, budget: float, sizes: Sequence[int] | None = None
) -> tuple[CollectiveTime, ...]:
    """Every collective of every size between `ranks` new processes, each for about `budget` seconds.

    Raises PlanError when one of them fails.
    """
    if sizes is None:
        sizes = CPU_BYTES if device == "cpu" else GPU_BYTES
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank, (device, ranks, budget, tuple(sizes), folder), nprocs=ranks, join=False,
            start_method="spawn",
        )  # fmt: skip
        assert context is not None
        end = time.monotonic() + DEADLINE
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise PlanError(
                        f"{ranks} processes did not measure their collectives in {DEADLINE:g} s",
                        "leave them out with --ranks 1",
                    )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            last = one_line(str(error).strip().splitlines()[-1])
            raise PlanError(
                f"{ranks} processes could not measure their collectives: {last}",
                "leave them out with --ranks 1",
            ) from error
        finally:
            for process in context.processes:
                process.kill()
        found = json.loads((Path(folder) / "times.json").read_text("utf-8"))
    return tuple(CollectiveTime.model_validate(each) for each in found)


def _rank(
    index: int, device: str, ranks: int, budget: float, sizes: tuple[int, ...], folder: str
) -> None:
    """One process of the group; the first writes what the slowest of them took."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(index)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=index, world_size=ranks
    )
    found = group_times(device, index, ranks, budget, sizes)
    if index == 0:
        (Path(folder) / "times.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def group_times(
    device: str, index: int, ranks: int, budget: float, sizes: Sequence[int]
) -> list[dict[str, object]]:
    """The fields of CollectiveTime for every collective and size; called by all ranks of a group."""
    return [
        {
            "backend": "nccl" if device == "cuda" else "gloo",
            "op": op,
            "ranks": ranks,
            "bytes": size,
            "seconds": _seconds(_collective(op, size, index, ranks, device), budget, device),
        }
        for op in OPS
        for size in sizes
    ]


def _collective(op: str, size: int, index: int, ranks: int, device: str) -> Callable[[], object]:
    """`op` over a tensor of `size` bytes of fp32, as a rank takes part in it."""
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    share = torch.zeros(whole.numel() // ranks, device=device)
    other = torch.zeros_like(whole)
    if op == "all-reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all-gather":
        return lambda: dist.all_gather_single(whole, share)
    if op == "reduce-scatter":
        return lambda: dist.reduce_scatter_single(share, whole)
    if op == "all-to-all":
        return lambda: dist.all_to_all_single(other, whole)
    if index == 0:
        return lambda: dist.send(whole, 1)
    return (lambda: dist.recv(whole, 0)) if index == 1 else (lambda: None)


def _seconds(run: Callable[[], object], budget: float, device: str) -> float:
    """Seconds of one call, of the slowest rank, in the fastest of some rounds."""
    once = _timed(run, 2, device)
    together = torch.tensor([once], device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    calls = max(1, min(200, int(budget / ROUNDS / max(float(together), 1e-6))))
    best = float("inf")
    for _ in range(ROUNDS):
        took = torch.tensor([_timed(run, calls, device)], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = min(best, float(took))
    return best


def _timed(run: Callable[[], object], calls: int, device: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
