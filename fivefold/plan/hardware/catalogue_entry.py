"""A line of the catalogue: data-sheet figures in the units that data sheets use."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import Efficiency
from fivefold.plan.hardware.prices import PRICES

GIB = 2**30


def entry(
    name: str,
    *,
    tera: Mapping[str, float],
    gib: float,
    terabytes: float,
    watts: float,
    efficiency: Efficiency,
    source: str,
    memory_source: str,
    **notes: str,
) -> Device:
    """`tera`: dense TFLOP/s by format; `gib`: memory that a process sees; `terabytes`: per second."""
    price = PRICES.get(name)
    return Device(
        name=name,
        peak={form: rate * 1e12 for form, rate in tera.items()},
        memory=gib * GIB,
        bandwidth=terabytes * 1e12,
        efficiency=efficiency,
        watts=watts,
        price=None if price is None else price.on_demand,
        spot_price=None if price is None else price.spot,
        source=source,
        notes={
            "memory": memory_source,
            **({} if price is None else {"price": price.source}),
            **notes,
        },
    )
