"""Numbers as a person reads them, the same on the terminal and in the report."""

from __future__ import annotations

import math

KIB = 1024


def number(value: float, digits: int = 4) -> str:
    """`digits` significant digits, thousands separated, powers of ten where zeros would pile up."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0 or (size >= 10 ** (digits - 1) and value == round(value) and size < 1e12):
        return f"{value:,.0f}"
    if 1e-3 <= size < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        return f"{value:,.{decimals}f}"
    return scientific(value, digits - 1)


def scientific(value: float, decimals: int = 1) -> str:
    """`3.0e-4`: without the exponent's sign and zero that Python pads it with."""
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: float) -> str:
    """1,234 as is; beyond, 12.3K, 4.56M, 7.89B, 1.2T."""
    rounded = float(f"{value:.3g}")  # first: 999,999 is 1M, not 1000K
    for limit, unit, letter in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "B"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "K"),
    ):
        if abs(rounded) >= limit:
            return f"{rounded / unit:.4g}{letter}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in binary units: `812 MiB`, `1.25 GiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        scaled = value / KIB**power
        if scaled >= 1:
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """`42 s`, `3:07`, `2:05:09`, `3 d 04:05`."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86_400)
    hours, minutes = divmod(rest // 60, 60)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{rest % 60:02d}"
    return f"{minutes}:{rest % 60:02d}" if minutes else f"{whole} s"


def latency(seconds: float) -> str:
    """`340 µs`, `41.7 ms`, `3.21 s`, and from two minutes on as `duration` has it."""
    if seconds >= 120:
        return duration(seconds)
    for unit, letter in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:
            rounded = float(f"{seconds / unit:.3g}")  # first: 0.9999 s is 1.00 s
            return f"{number(rounded, 3)} {letter}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"


def share(value: float) -> str:
    """A fraction in per cent: `41.3%`."""
    return f"{value:.1%}"
