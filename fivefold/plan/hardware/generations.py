"""Which curve of efficiency each generation of devices has."""

from __future__ import annotations

from fivefold.plan.hardware.efficiency import ADA, AMPERE, BLACKWELL, CDNA3, HOPPER, VOLTA

__all__ = ["ADA", "AMPERE", "BLACKWELL", "CDNA3", "HOPPER", "VOLTA"]
