"""Numbers with units, as people write them: `400Gb/s`, `80 GiB`, `989 TFLOP/s`, `3us`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
NUMBER = re.compile(r"([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)")
UNIT = re.compile(r"(Ki|Mi|Gi|Ti|[kKMGTPE]?)(B|b|bit|FLOPS?|FLOP|flops?|OPS?)?(?:/s|ps)?")


def quantity(text: str) -> float:
    """The number in bytes, bytes per second, FLOP/s or seconds. `b` is a bit. Raises ValueError."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit, such as 450GB/s")
    value, unit = float(match[1].replace("_", "")), match[2].strip()
    if unit in SECONDS:
        return value * SECONDS[unit]
    parts = UNIT.fullmatch(unit)
    if parts is None:
        raise ValueError(
            f"{text!r} has an unknown unit {unit!r}: use GB/s, GiB, Gb/s, TFLOP/s or us"
        )
    scale = BINARY.get(parts[1]) or DECIMAL[parts[1]]
    return value * scale / (8 if parts[2] in ("b", "bit") else 1)


def _convert(value: Any) -> Any:
    return quantity(value) if isinstance(value, str) else value


Quantity = Annotated[float, BeforeValidator(_convert)]
"""A pydantic field that takes a plain number or one with a unit."""
