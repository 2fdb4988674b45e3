"""Gradients are collected, sent in one order, and sent while backward still runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.axes.dp.bucket import make_buckets
from fivefold.axes.dp.reducer import AllReducer, Groups, Progress

NOBODY = Groups(None, None, None)


class Recording(AllReducer):
    """Notes what happens instead of sending."""

    def __init__(self, *args: Any) -> None:
        self.events: list[tuple[str, int]] = []
        super().__init__(*args)

    def collect(self, index: int, place: int, parameter: Tensor) -> None:
        self.events.append(("gradient", index))
        super().collect(index, place, parameter)

    def send(self, index: int, progress: Progress) -> None:
        self.events.append(("send", index))


def chain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(dtype)


def reducer_of(model: nn.Module, kind: type[AllReducer] = Recording) -> Any:
    buckets = make_buckets(list(model.named_parameters()), 1)  # one bucket a parameter
    return kind(buckets, NOBODY, torch.float32)


def test_a_bucket_leaves_before_backward_is_over() -> None:
    model = chain()
    reducer = reducer_of(model)
    reducer.begin(last=True)
    model(torch.ones(1, 4)).sum().backward()
    assert reducer.events == [
        ("gradient", 0), ("send", 0), ("gradient", 1), ("send", 1), ("gradient", 2), ("send", 2),
    ]  # fmt: skip


def test_buckets_leave_in_order_whatever_comes_first() -> None:
    model = chain()
    reducer = reducer_of(model)
    reducer.begin(last=True)
    # Each layer's own backward, first layer first: the reverse of the buckets' order.
    for layer in model:
        layer(torch.ones(1, 4)).sum().backward()
    assert [event for event in reducer.events if event[0] == "send"] == [
        ("send", 0), ("send", 1), ("send", 2),
    ]  # fmt: skip
    assert reducer.events[-3:] == [("send", 0), ("send", 1), ("send", 2)]


def test_only_the_last_micro_batch_is_sent_and_an_unused_parameter_does_not_hold_it_up() -> None:
    model = chain()
    reducer = reducer_of(model)
    reducer.begin(last=False)
    model(torch.ones(1, 4)).sum().backward()
    assert not [event for event in reducer.events if event[0] == "send"]
    reducer.begin(last=True)
    model[0](torch.ones(1, 4)).sum().backward()
    reducer.finish()
    assert [index for kind, index in reducer.events if kind == "send"] == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_in_fp32(dtype: torch.dtype) -> None:
    model = chain(dtype)
    reducer = reducer_of(model, AllReducer)
    inputs = [torch.randn(2, 4, dtype=dtype) for _ in range(5)]
    wanted = {name: torch.zeros(4, 4) for name, _ in model.named_parameters()}
    twin = chain(dtype)
    for step in range(2):  # the second step starts from zero again
        for index, x in enumerate(inputs):
            reducer.begin(last=index == len(inputs) - 1)
            model(x).sum().backward()
            if step == 0:
                twin.zero_grad()
                twin(x).sum().backward()
                for name, parameter in twin.named_parameters():
                    wanted[name] += parameter.grad.float()
        reducer.finish()
        found = reducer.gradients()
        for name, gradient in wanted.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)
        reducer.zero()
        assert all(float(g.abs().sum()) == 0 for g in reducer.gradients().values())
