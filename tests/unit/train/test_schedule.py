"""Schedules at their corners, and as pure functions of the step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.config import OptimizerSection
from fivefold.engines.train.schedule import learning_rate

KINDS = ["cosine", "linear", "wsd", "constant"]


def rates(steps: int, **keys: object) -> list[float]:
    config = OptimizerSection(lr=1.0, **keys)  # type: ignore[arg-type]
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_linear_and_reaches_the_peak(kind: str) -> None:
    found = rates(50, schedule=kind, warmup=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_update_is_at_the_floor(kind: str) -> None:
    assert rates(50, schedule=kind, warmup=4, final_lr=0.1)[-1] == pytest.approx(0.1)


def test_shapes() -> None:
    assert rates(5, schedule="linear", final_lr=0.0) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    half = 0.5 * (1 + 2**-0.5)
    assert rates(5, schedule="cosine", final_lr=0.0) == pytest.approx([1, half, 0.5, 1 - half, 0])
    # Three of ten updates decay.
    assert rates(10, schedule="wsd", decay=0.3, final_lr=0.0) == pytest.approx(
        [1] * 7 + [2 / 3, 1 / 3, 0]
    )
    assert set(rates(10, schedule="constant")) == {1.0}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    steps=st.integers(1, 60),
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 70),
    decay=st.floats(0.01, 1.0),
    floor=st.floats(0.0, 1.0),
)
def test_rates_rise_then_fall_within_their_limits(
    steps: int, kind: str, warmup: int, decay: float, floor: float
) -> None:
    found = rates(steps, schedule=kind, warmup=warmup, decay=decay, final_lr=floor)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 1 for rate in rising)
    assert all(floor - 1e-12 <= rate <= 1 for rate in falling)
