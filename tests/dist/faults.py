"""Known mistakes of data parallelism, planted on purpose."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from fivefold.axes.dp.replicated import ReplicatedAxis
from fivefold.engines.train import step as step_module
from tests.dist import cases


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


def no_reduction() -> Any:
    """Gradients stay each rank's own."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return _Done() if async_op else real(tensor, *args, **kwargs)

    def scatter(output: Any, full: Any, **kwargs: Any) -> Any:
        output.copy_(full.chunk(2)[dist.get_rank()])
        return _Done()

    return _both(
        mock.patch("torch.distributed.all_reduce", all_reduce),
        mock.patch("torch.distributed.reduce_scatter_tensor", scatter),
    )


def average_instead_of_sum() -> Any:
    """The division by the number of targets already happened; this divides again."""
    real = ReplicatedAxis.reduce

    def reduce(self: ReplicatedAxis) -> None:
        real(self)
        for gradient in self._gradients.values():
            gradient.div_(2)

    return mock.patch.object(ReplicatedAxis, "reduce", reduce)


def norm_counted_twice() -> Any:
    """Sums of squares added over copies, or not over parts."""
    return mock.patch.object(ReplicatedAxis, "sum_shards", lambda self, v: v * 2)


def targets_of_this_rank_alone() -> Any:
    """Each rank divides by its own number of targets."""

    def agree(self: Any, targets: int, stop: bool) -> tuple[int, bool]:
        return targets * 2, stop

    return mock.patch.object(step_module.TrainStep, "_agree", agree)


def masters_not_published() -> Any:
    """Other ranks' rows are never gathered; copies never refreshed."""
    return mock.patch.object(ReplicatedAxis, "publish", lambda self: None)


FAULTS = {
    "no_reduction": no_reduction,
    "average_instead_of_sum": average_instead_of_sum,
    "norm_counted_twice": norm_counted_twice,
    "targets_of_this_rank_alone": targets_of_this_rank_alone,
}


@contextmanager
def _both(first: Any, second: Any) -> Any:
    with first, second:
        yield


def train_with(fault: str, layout: str) -> dict[str, Any]:
    with FAULTS[fault]():
        return cases.train(layout)
