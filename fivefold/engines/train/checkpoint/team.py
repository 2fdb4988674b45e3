"""The ranks that save and load together: they succeed together, or fail with one error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fivefold.core.errors import CheckpointError, FivefoldError

T = TypeVar("T")
Describe = Callable[[BaseException], CheckpointError]
# Longer than the slowest write of one rank: the others wait for it in a collective.
TIMEOUT = timedelta(hours=2)


class Team:
    """A gloo group of its own over all ranks, or one process without any.

    Collectives of the thread that writes must not meet those of training in one group, so a
    Checkpointer has a team for each of its two threads. Making one is a collective call.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None
        self.rank = dist.get_rank(self.group) if several else 0
        self.size = dist.get_world_size(self.group) if several else 1

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in order of rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, work: Callable[[], T], describe: Describe) -> T:
        """Do `work` on every rank; this rank's result.

        If it fails anywhere, every rank raises the same error: that of the lowest rank that
        failed, worded by `describe` unless it is one for users already.
        """
        value, mine = _attempt(work, describe)
        error = next((e for e in self.gather(mine) if e is not None), None)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T], describe: Describe) -> T:
        """Do `work` on rank 0; its result, or its error, on every rank."""
        outcome = _attempt(work, describe) if self.rank == 0 else (None, None)
        if self.group is not None:
            box: list[Any] = [outcome]
            dist.broadcast_object_list(box, src=0, group=self.group)
            outcome = box[0]
        value, error = outcome
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


def _attempt(work: Callable[[], T], describe: Describe) -> tuple[T | None, FivefoldError | None]:
    try:
        return work(), None
    except FivefoldError as error:
        return None, error
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        return None, describe(error)
