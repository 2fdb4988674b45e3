"""The global norm, and gradients scaled down to it in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.part import Part
from fivefold.engines.train.clip import clip_gradients


class Axis:
    """Gradients of one rank, beside others whose squares sum to `others`."""

    def __init__(self, gradients: dict[str, Tensor], others: float = 0.0, copies: int = 1) -> None:
        self.held, self.others, self.copies = gradients, others, copies

    def gradients(self) -> dict[str, Tensor]:
        return self.held

    def masters(self) -> dict[str, Part]:
        return {name: Part.of(gradient, 0, self.copies) for name, gradient in self.held.items()}

    def sum(self, value: Tensor) -> Tensor:
        return value + self.others


def clip(axis: Axis, limit: float | None) -> Tensor:
    chosen: Any = axis
    return clip_gradients(chosen, limit)


def test_it_is_torchs_clipping() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 3), (7,), (2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 3
    ours = Axis({str(i): p.grad.clone() for i, p in enumerate(parameters)})
    norm = clip(ours, 1.0)
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)
    for i, parameter in enumerate(parameters):
        torch.testing.assert_close(ours.held[str(i)], parameter.grad, rtol=1e-6, atol=0)


def test_small_gradients_are_left_alone_and_none_means_no_limit() -> None:
    for limit, value in ((6.0, 3.0), (None, 300.0)):
        axis = Axis({"a": torch.tensor([value]), "b": torch.tensor([4.0])})
        clip(axis, limit)
        assert axis.held["a"].tolist() == [value]


def test_other_ranks_rows_count() -> None:
    axis = Axis({"a": torch.tensor([3.0])}, others=16.0)
    assert float(clip(axis, 1.0)) == pytest.approx(5.0)
    assert float(axis.held["a"]) == pytest.approx(0.6, rel=1e-5)


def test_each_of_n_copies_counts_an_nth() -> None:
    axis = Axis({"a": torch.tensor([4.0])}, others=8.0, copies=2)  # the other copy, the same
    assert float(clip(axis, None)) == pytest.approx(4.0)


def test_the_scaled_gradient_is_in_the_same_memory() -> None:
    gradient = torch.full((4,), 10.0)
    clip(Axis({"a": gradient}), 1.0)
    assert float(gradient.norm()) == pytest.approx(1.0, rel=1e-5)


def test_nothing_here_and_nothing_finite() -> None:
    assert float(clip(Axis({"a": torch.zeros(0)}), 1.0)) == 0.0
    assert math.isnan(clip(Axis({"a": torch.tensor([float("nan")])}), 1.0))
    assert math.isinf(clip(Axis({"a": torch.tensor([float("inf")])}), 1.0))
