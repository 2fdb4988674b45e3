"""Gradients of a pipeline's stages travel between data ranks while backwards still run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.cases import Run
from tests.dist.harness import Workers
from tests.parity.lattice.cases import batches, model_config


def sent(layout: str) -> tuple[int, int, int]:
    """Buckets, those sent when the pipeline is done, and those sent before its last backward."""
    run = Run(layout, model_config("tied", layout), bucket_bytes=4096)
    reducer: Any = run.axis.axis._families[0].reducer  # type: ignore[attr-defined]
    early = 0
    real = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal early
        early = reducer._next  # of the last call: what was on its way before it
        real(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        run.axis.accumulate(batches(0, run.rank, run.ranks, False), 1.0)
    finally:
        torch.autograd.backward = real
    done = reducer._next
    run.axis.reduce()
    dist.barrier()
    return len(reducer.buckets), done, early


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved,virtual=2", "zbv", "dualpipe"])
def test_all_buckets_leave_before_reduce(
    workers: Callable[[int], Workers], schedule: str
) -> None:
    answers = workers(4).run(sent, f"pp=2,dp_replicate=2,schedule={schedule}")
    assert all(done == buckets for buckets, done, _ in answers)
    if schedule == "interleaved,virtual=2":  # the later stage of each rank is done first
        assert all(early > 0 for _, _, early in answers)
