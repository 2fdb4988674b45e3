"""AdamW over masters is the formula of the paper, decays what it should, and can be continued."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.part import Part
from fivefold.core.config import OptimizerSection
from fivefold.engines.train.optimizer import MasterOptimizer

CONFIG = OptimizerSection(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
SHAPES = {"embedding.weight": (7, 4), "norm.weight": (4,), "layers.0.attention.query.bias": (8,)}


def fresh() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parts(masters: dict[str, Tensor]) -> dict[str, Part]:
    return {name: Part.of(value) for name, value in masters.items()}


class Steps:
    """A MasterOptimizer whose gradients are those of the step."""

    def __init__(self, masters: dict[str, Tensor]) -> None:
        self.now: dict[str, Tensor] = {}
        self.optimizer = MasterOptimizer(parts(masters), lambda: self.now, CONFIG)

    def take(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.now = gradients_of(step)
            self.optimizer.step(1e-2 / (step + 1))


def by_formula(steps: int) -> dict[str, Tensor]:
    """Algorithm 2 of Loshchilov and Hutter 2019 in fp64."""
    values = {name: value.double() for name, value in fresh().items()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    (a, b), lr = CONFIG.betas, 1e-2
    for step in range(steps):
        for name, gradient in gradients_of(step).items():
            wide, rate = gradient.double(), lr / (step + 1)
            first[name] = a * first[name] + (1 - a) * wide
            second[name] = b * second[name] + (1 - b) * wide**2
            decay = CONFIG.weight_decay if name == "embedding.weight" else 0.0
            values[name] *= 1 - rate * decay
            mean = first[name] / (1 - a ** (step + 1))
            spread = (second[name] / (1 - b ** (step + 1))).sqrt()
            values[name] -= rate * mean / (spread + CONFIG.eps)
    return values


def test_it_is_the_formula_and_only_matrices_decay() -> None:
    masters = fresh()
    Steps(masters).take(0, 12)
    for name, value in by_formula(12).items():
        torch.testing.assert_close(masters[name].double(), value, rtol=1e-5, atol=1e-6)


def test_a_continued_optimizer_gives_the_same_bits() -> None:
    straight = fresh()
    Steps(straight).take(0, 6)
    masters = fresh()
    before = Steps(masters)
    before.take(0, 3)
    after = Steps(masters)
    for name, value in after.optimizer.state_tensors().items():
        value.values.copy_(before.optimizer.state_tensors()[name].values)
    after.optimizer.load_scalars(json.loads(json.dumps(before.optimizer.scalars())))
    after.take(3, 6)
    assert all(torch.equal(masters[name], straight[name]) for name in SHAPES)
    assert after.optimizer.scalars() == {"updates": 6.0}


def test_without_its_count_a_continued_optimizer_would_differ() -> None:
    """The bias correction depends on the number of updates: the check above can fail."""
    straight, masters = fresh(), fresh()
    Steps(straight).take(0, 6)
    before = Steps(masters)
    before.take(0, 3)
    after = Steps(masters)
    for name, value in after.optimizer.state_tensors().items():
        value.values.copy_(before.optimizer.state_tensors()[name].values)
    after.take(3, 6)
    assert not torch.equal(masters["norm.weight"], straight["norm.weight"])


def test_state_is_there_before_the_first_step() -> None:
    found = Steps(fresh()).optimizer.state_tensors()
    assert set(found) == {f"{m}/{name}" for m in ("exp_avg", "exp_avg_sq") for name in SHAPES}
    assert all(not value.values.any() for value in found.values())


def test_a_rank_may_hold_no_rows_of_a_parameter() -> None:
    masters = fresh()
    masters["norm.weight"] = masters["norm.weight"][:0]
    steps = Steps(masters)

    def without_rows() -> dict[str, Tensor]:
        found: dict[str, Any] = gradients_of(0)
        return {**found, "norm.weight": found["norm.weight"][:0]}

    steps.optimizer = MasterOptimizer(parts(masters), without_rows, CONFIG)
    steps.optimizer.step(1e-2)
    assert steps.optimizer.state_tensors()["exp_avg/norm.weight"].shape == (0,)


@pytest.mark.parametrize("name", list(SHAPES))
def test_masters_keep_no_gradient(name: str) -> None:
    masters = fresh()
    Steps(masters).take(0, 1)
    assert masters[name].grad is None
