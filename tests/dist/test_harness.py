"""The harness itself: a failing, dying or hanging rank ends the case and shows why."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import WorkerError, Workers


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    started = Workers(2)  # of its own: these cases end workers
    yield started
    started.stop()


def total(number: int) -> tuple[int, int]:
    value = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    time.sleep(600)


def test_answers_come_by_rank_and_workers_are_used_again(pair: Workers) -> None:
    assert pair.run(total, 3) == [(0, 7), (1, 7)]
    processes = [process.pid for process in pair._processes]
    assert pair.run(total, 5) == [(0, 11), (1, 11)]
    assert [process.pid for process in pair._processes] == processes


def test_the_failing_ranks_traceback_is_shown(pair: Workers) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)^rank 1:.*fail_on_rank_1.*ValueError: planted"):
        pair.run(fail_on_rank_1)
    assert time.monotonic() - started < 60  # not the peers' own timeout


def test_a_hang_names_each_ranks_collective(pair: Workers) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pair.run(wait_on_the_other, timeout=3)
    assert time.monotonic() - started < 40
    message = str(caught.value)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} is in:(\n  File.*)+", message), message
    assert "in recv" in message and "in barrier" in message


def wait_on_the_other() -> None:
    """Rank 0 waits in a receive, rank 1 in a barrier: neither ends."""
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4), src=1)
    dist.barrier()


def test_a_rank_that_dies_or_hangs_is_named(pair: Workers) -> None:
    with pytest.raises(WorkerError, match=r"^rank 1 died"):
        pair.run(die_on_rank_1)
    with pytest.raises(WorkerError, match=r"rank \[0, 1\] gave no answer in 5 s"):
        pair.run(hang, timeout=5)
    assert not pair._processes  # killed, so that nothing outlives the tests


def test_one_worker_has_no_process_group() -> None:
    worker = Workers(1)
    assert worker.run(dist.is_initialized) == [False]
    worker.stop()
