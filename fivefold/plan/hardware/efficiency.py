"""How much of a device's peak real kernels reach: one model for every prediction.

A product of f FLOP that moves b bytes takes launch + max((f + small) / (products * peak),
b / (bandwidth * memory)); elementwise kernels take launch + b / (bandwidth * memory).
"""

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


AMPERE = Efficiency(
    products=0.80, small=5e9, bandwidth=0.78, attention=0.60, launch=5e-6,
    source="products, bandwidth: times of one layer of 22B in Korthikanti et al. 2022 (2205.05198), "
    "table 4, with and without sequence parallelism and recomputed scores; launch: vTrain's (2312.12391) "
    "times of small layers; attention: FlashAttention-2 (2307.08691), 190 of 312 TFLOP/s",
)  # fmt: skip
HOPPER = Efficiency(
    products=0.66, small=15e9, bandwidth=0.85, attention=0.55, launch=5e-6,
    source="products: 650 TFLOP/s under the power limit, what Llama 3 (2407.21783), table 4, "
    "takes; attention: FlashAttention-3 (2407.08608) forward and backward, causal; rest as data sheets",
)  # fmt: skip
VOLTA = Efficiency(
    products=0.75, small=3e9, bandwidth=0.80, attention=0.35, launch=5e-6,
    source="assumed like Ampere's",
)  # fmt: skip
ADA = Efficiency(
    products=0.80, small=5e9, bandwidth=0.85, attention=0.60, launch=5e-6,
    source="assumed like Ampere's",
)  # fmt: skip
BLACKWELL = Efficiency(
    products=0.66, small=30e9, bandwidth=0.85, attention=0.50, launch=5e-6,
    source="products like Hopper's; attention assumed",
)  # fmt: skip
CDNA3 = Efficiency(
    products=0.55, small=20e9, bandwidth=0.80, attention=0.40, launch=8e-6, source="assumed"
)
