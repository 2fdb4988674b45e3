"""When requests arrive that do not wait for one another. Times are seconds from the start."""

from __future__ import annotations

import math

import numpy as np

from fivefold.engines.serve.load.errors import LoadError


def fixed(count: int, rate: float) -> list[float]:
    """One every 1 / `rate` seconds, the first at once."""
    _check(rate)
    return [index / rate for index in range(count)]


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Independent arrivals of `rate` a second on average: gaps are exponentially distributed."""
    _check(rate)
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


def _check(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise LoadError(f"a rate of {rate} requests a second", "give a number above 0")
