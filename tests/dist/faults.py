"""Known mistakes of data parallelism, planted on purpose."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fivefold.axes.dp.replicated import ReplicatedAxis
from fivefold.axes.parallel import ParallelModel
from fivefold.axes.part import Slice
from fivefold.engines.train.step import TrainStep
from tests.dist import cases

DDP, ZERO_1, ZERO_2 = "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2"
ZERO_3, HSDP = "dp_shard=2,zero=3", "dp_replicate=2,dp_shard=2,zero=2"


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


def no_reduction() -> AbstractContextManager[Any]:
    """Gradients stay each rank's own."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return _Done() if async_op else real(tensor, *args, **kwargs)

    def scatter(output: Any, input: Any, **kwargs: Any) -> Any:
        output.copy_(input.chunk(2)[dist.get_rank()])
        return _Done()

    both = ExitStack()
    both.enter_context(mock.patch("torch.distributed.all_reduce", all_reduce))
    both.enter_context(mock.patch("torch.distributed.reduce_scatter_single", scatter))
    return both


def average_instead_of_sum() -> AbstractContextManager[Any]:
    """The division by the number of targets already happened; this divides again."""
    real = ReplicatedAxis.reduce

    def reduce(self: ReplicatedAxis) -> None:
        real(self)
        for gradient in self.gradients().values():
            gradient.div_(2)

    both = ExitStack()
    both.enter_context(mock.patch.object(ReplicatedAxis, "reduce", reduce))
    both.enter_context(
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    )
    return both


def copies_not_summed() -> AbstractContextManager[Any]:
    """HSDP: reduce-scatter inside the group, and nothing between the groups."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Done() if tensor.ndim == 1 and tensor.numel() > 2 else real(tensor, *args, **kwargs)

    return mock.patch("torch.distributed.all_reduce", all_reduce)


def norm_counted_twice() -> AbstractContextManager[Any]:
    """Sums of squares added over copies as well as over parts."""
    return mock.patch.object(Slice, "copied", lambda self, copy, copies: self)


def norm_of_own_rows() -> AbstractContextManager[Any]:
    """Sums of squares not added over parts: each rank clips by another factor."""
    real = ParallelModel.sum
    return mock.patch.object(
        ParallelModel,
        "sum",
        lambda self, value: value if value.dtype == torch.float64 else real(self, value),
    )


def targets_of_this_rank_alone() -> AbstractContextManager[Any]:
    """Each rank divides by its own number of targets, as if all ranks had as many."""
    return mock.patch.object(
        TrainStep, "_agree", lambda self, targets, stop: (targets * self.axis_ranks, stop)
    )


def masters_not_published() -> AbstractContextManager[Any]:
    """The other ranks' rows are never gathered."""
    return mock.patch.object(ReplicatedAxis, "publish", lambda self: None)


FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no_reduction": (no_reduction, (DDP, ZERO_1, ZERO_2, ZERO_3)),
    "average_instead_of_sum": (average_instead_of_sum, (DDP, ZERO_1, ZERO_2, ZERO_3)),
    "copies_not_summed": (copies_not_summed, (HSDP,)),
    "norm_counted_twice": (norm_counted_twice, (DDP, HSDP)),
    "norm_of_own_rows": (norm_of_own_rows, (ZERO_1, ZERO_2, ZERO_3)),
    "targets_of_this_rank_alone": (targets_of_this_rank_alone, (DDP, ZERO_2, ZERO_3)),
    "masters_not_published": (masters_not_published, (ZERO_1, ZERO_2)),
}
PLANTED = [(fault, layout) for fault, (_, layouts) in FAULTS.items() for layout in layouts]
STEPS = 4


def train_with(fault: str, layout: str) -> dict[str, Any]:
    with FAULTS[fault][0](), mock.patch.object(TrainStep, "axis_ranks", 2, create=True):
        return cases.train(layout, steps=STEPS)
