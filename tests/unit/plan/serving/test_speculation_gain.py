"""Leviathan et al. 2023: tokens a step, gain, and the best number of drafts."""

from __future__ import annotations

import random

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.serving.speculation import Speculation, best


def test_tokens_are_the_expectation_of_accepting_in_a_row() -> None:
    draw, found = random.Random(0), Speculation(0.7, 4)
    total = 0
    for _ in range(40_000):
        total += 1
        for _ in range(4):
            if draw.random() >= 0.7:
                break
            total += 1
    assert found.tokens == pytest.approx(total / 40_000, rel=0.01)
    assert found.tokens == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4)


def test_figures_of_the_paper() -> None:
    """Table 1: acceptance 0.8 with 5 drafts that cost nothing: 3.69 times as fast; 0.9 and 10:
    6.86."""
    assert Speculation(0.8, 5, 0.0).gain == pytest.approx(3.69, abs=0.005)
    assert Speculation(0.9, 10, 0.0).gain == pytest.approx(6.86, abs=0.005)


def test_the_best_number_of_drafts() -> None:
    assert best(0.1, 0.5) is None
    found = best(0.8, 0.05)
    assert found is not None
    gains = [Speculation(0.8, n, 0.05).gain for n in range(1, 33)]
    assert found.gain == max(gains) and 5 <= found.drafted <= 12


@pytest.mark.parametrize("values", [(1.0, 4), (-0.1, 4), (0.5, 0), (0.5, 99)])
def test_what_is_no_speculation(values: tuple[float, int]) -> None:
    with pytest.raises(PlanError):
        Speculation(*values)
    with pytest.raises(PlanError):
        Speculation(0.5, 4, -1.0)
