"""How much of a device's peak real kernels reach: one model for every prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Parameters of the curve; `source` says from which measurements they come.

    products: share of the matrix peak that large matrix products reach.
    small: FLOP at which a product reaches half of that (a product of f FLOP: f / (f + small)).
    bandwidth: share of the memory bandwidth that elementwise kernels reach.
    attention: share of the matrix peak that fused attention reaches.
    launch: seconds a kernel costs at least.
    """

    products: float
    small: float
    bandwidth: float
    attention: float
    launch: float
    source: str
