"""A parameter that some micro-batches do not use (as routed experts will be) loses no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.dp.protocol import Cut
from fivefold.axes.dp.replicated import ReplicatedAxis
from fivefold.axes.part import Slice
from fivefold.core.layout import Layout
from tests.dist.cases import mesh_of, whole
from tests.dist.harness import Workers

WIDTH, CHOICES = 6, 3
# Which expert each micro-batch of each of two ranks takes: expert 2 is never used by rank 1.
ROUTES = [[0, 2, 1], [0, 1, 1]]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CHOICES))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.branches[expert](torch.tanh(self.first(x))).square().sum()


def inputs(rank: int, index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + index))


def gradients(layout: str) -> dict[str, Tensor]:
    """Summed gradients of all ranks' micro-batches, whole."""
    chosen = Layout.parse(layout)
    module = Experts()
    cut = Cut({name: Slice.of(p) for name, p in module.named_parameters()})
    axis = ReplicatedAxis(
        module, cut, layout=chosen, mesh=mesh_of(chosen), device=torch.device("cpu"),
        dtype=torch.float32, wire_dtype=torch.float32, bucket_bytes=100,
    )  # fmt: skip
    route = ROUTES[dist.get_rank()]
    for index, expert in enumerate(route):
        axis.begin(last=index == len(route) - 1)
        module(inputs(dist.get_rank(), index), expert).backward()
    axis.reduce()
    found = axis.gradients()
    return whole({name: m.like(found[name]) for name, m in axis.masters().items()})


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2"])
def test_every_gradient_arrives(workers: Callable[[int], Workers], layout: str) -> None:
    module = Experts()
    for rank, route in enumerate(ROUTES):
        for index, expert in enumerate(route):
            module(inputs(rank, index), expert).backward()
    for found in workers(2).run(gradients, layout):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
