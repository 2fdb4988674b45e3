"""The times of collectives, taken by ranks that are there."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from fivefold.plan.calibrate.collectives import OPS, group_times
from fivefold.plan.hardware.profile import CollectiveTime
from tests.dist.harness import Workers


def times(sizes: tuple[int, ...]) -> list[dict[str, object]]:
    return group_times("cpu", dist.get_rank(), dist.get_world_size(), 0.003, sizes)


def test_every_collective_is_timed_and_ranks_agree(workers: Callable[[int], Workers]) -> None:
    first, second = workers(2).run(times, (4096, 1 << 20))
    assert first == second  # the slowest rank's time, known to all
    found = [CollectiveTime.model_validate(each) for each in first]
    assert [(c.op, c.bytes) for c in found] == [(op, n) for op in OPS for n in (4096, 1 << 20)]
    assert all(c.seconds > 0 and c.ranks == 2 for c in found)
