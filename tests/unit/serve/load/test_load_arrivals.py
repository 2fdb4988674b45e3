"""Arrivals: the rates asked for, in their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.load.arrivals import fixed, poisson
from fivefold.engines.serve.load.errors import LoadError


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.floats(0.01, 1000), st.integers(0, 2**31))
def test_poisson_gaps_are_exponential(rate: float, seed: int) -> None:
    times = np.array(poisson(4000, rate, seed))
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert abs(gaps.mean() * rate - 1) < 5 / math.sqrt(4000)
    ordered = np.sort(gaps)
    expected = 1 - np.exp(-rate * ordered)
    distance = np.abs(expected - (np.arange(4000) + 0.5) / 4000).max()  # Kolmogorov-Smirnov
    assert distance < 2.2 / math.sqrt(4000)  # exceeded once in 8,000 draws


def test_counts_of_equal_windows_vary_as_much_as_their_mean() -> None:
    times = np.array(poisson(20_000, 50.0, 3))
    counts = np.bincount((times[times < 380]).astype(int))
    assert 0.8 < counts.var() / counts.mean() < 1.25
    assert poisson(10, 2.0, 7) == poisson(10, 2.0, 7) != poisson(10, 2.0, 8)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.floats(0.01, 1000), st.integers(1, 500))
def test_even_arrivals_are_even(rate: float, count: int) -> None:
    times = fixed(count, rate)
    assert times[0] == 0 and len(times) == count
    assert np.allclose(np.diff(times), 1 / rate)


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_rates_that_are_none(rate: float) -> None:
    for make in (lambda: fixed(3, rate), lambda: poisson(3, rate, 0)):
        with pytest.raises(LoadError, match=r"a rate of .* give a number above 0"):
            make()
