"""Round ticks and their labels for a range of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fivefold.observe import format as as_text

Kind = Literal["number", "count", "share", "bytes", "seconds"]
BINARY = ((4, " TiB"), (3, " GiB"), (2, " MiB"), (1, " KiB"))
TIMES = ((600, 60.0, " min"), (0.9, 1.0, " s"), (9e-4, 1e-3, " ms"), (0.0, 1e-6, " µs"))
DECIMAL = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class Axis:
    """A range, linear or logarithmic, with labelled ticks inside it."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(
    low: float, high: float, kind: Kind, *, from_zero: bool = False, wanted: int = 5
) -> Axis:
    """An axis over finite `low`..`high`, ending on round values; at least one step wide."""
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - margin), high + margin
    scale, suffix = _unit(max(abs(low), abs(high)), kind)
    step = _round_step((high - low) / scale / wanted)
    first, last = math.floor(low / scale / step + 1e-9), math.ceil(high / scale / step - 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = []
    for index in range(first, last + 1):
        label = f"{index * step:.{decimals}f}{suffix}" if index else "0"
        ticks.append((index * step * scale, label))
    return Axis(first * step * scale, last * step * scale, False, tuple(ticks))


def step_axis(first: int, last: int, wanted: int = 6) -> Axis:
    """An axis of step numbers: it ends where the steps do, with ticks at whole numbers."""
    if first == last:
        return Axis(first - 1, first + 1, False, ((first, f"{first:,}"),))
    step = max(1.0, _round_step((last - first) / wanted))
    values = range(math.ceil(first / step) * int(step), last + 1, int(step))
    scale, suffix = _unit(last, "count")
    decimals = max(0, -math.floor(math.log10(step / scale) + 1e-9))
    ticks = tuple((float(v), f"{v / scale:.{decimals}f}{suffix}" if v else "0") for v in values)
    return Axis(first, last, False, ticks)


def log_axis(low: float, high: float, kind: Kind = "number") -> Axis:
    """A logarithmic axis over positive values that differ by more than a few times."""
    low, high = low / 1.1, high * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 6)
    factors = (1, 2, 5) if high < 200 * low else (1,)
    values = [f * 10.0**d for d in decades if d % every == 0 for f in factors]
    text = _time_tick if kind == "seconds" else _power_tick
    ticks = tuple((v, text(v)) for v in values if low <= v <= high)
    return Axis(low, high, True, ticks)


def value_text(value: float, kind: Kind) -> str:
    """One value, in full: what a pointer over the curve is told."""
    if kind == "share":
        return as_text.share(value)
    if kind == "bytes":
        return as_text.size(value)
    if kind == "seconds":
        return as_text.latency(value)
    return as_text.count(value) if kind == "count" else as_text.number(value)


def _power_tick(value: float) -> str:
    return as_text.number(value, 1)


def _time_tick(value: float) -> str:
    unit, suffix = _unit(value, "seconds")
    return f"{value / unit:g}{suffix}"


def _unit(largest: float, kind: Kind) -> tuple[float, str]:
    """What labels are multiples of, so that they stay short: 0.01 and `%`, 2**30 and ` GiB`, …"""
    if kind == "share":
        return 0.01, "%"
    if kind == "bytes":
        found = [(1024.0**p, suffix) for p, suffix in BINARY if largest >= 900 * 1024.0 ** (p - 1)]
        return found[0] if found else (1.0, " B")
    if kind == "seconds":
        return next((unit, suffix) for least, unit, suffix in TIMES if largest >= least)
    if kind == "count":
        found = [unit for unit in DECIMAL if largest >= unit[0]]
        return found[0] if found and largest >= 1e4 else (1.0, "")
    if largest == 0 or 1e-3 <= largest < 1e5:
        return 1.0, ""
    exponent = math.floor(math.log10(largest))
    return 10.0**exponent, f"e{exponent}"


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
