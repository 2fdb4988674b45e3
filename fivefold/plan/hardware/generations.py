"""Which curve of efficiency each generation of devices has."""

from __future__ import annotations

from fivefold.plan.hardware.efficiency import Efficiency

VOLTA = Efficiency(
    products=0.75, small=3e9, bandwidth=0.85, attention=0.35, launch=5e-6,
    source="assumed like Ampere's",
)  # fmt: skip
AMPERE = Efficiency(
    products=0.80, small=5e9, bandwidth=0.85, attention=0.60, launch=5e-6, source="assumed"
)
ADA = Efficiency(
    products=0.80, small=5e9, bandwidth=0.85, attention=0.60, launch=5e-6,
    source="assumed like Ampere's",
)  # fmt: skip
HOPPER = Efficiency(
    products=0.72, small=15e9, bandwidth=0.85, attention=0.55, launch=5e-6, source="assumed"
)
BLACKWELL = Efficiency(
    products=0.72, small=30e9, bandwidth=0.85, attention=0.50, launch=5e-6,
    source="assumed like Hopper's",
)  # fmt: skip
CDNA3 = Efficiency(
    products=0.55, small=20e9, bandwidth=0.80, attention=0.40, launch=8e-6, source="assumed"
)
