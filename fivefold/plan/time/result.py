"""What a step takes, and what of it is spent on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("tp", "cp", "ep", "pp", "dp")
# Four of five published steps were within so much of what is predicted for them (benches/plan_accuracy.py):
# of dense models, and of those with experts, of which fewer are published.
DENSE_ERROR, EXPERTS_ERROR = 0.15, 0.25


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, seen from the pipeline rank that computes longest.

    total = compute + recompute + sum of exposed + bubble + optimizer + data.
    compute: forward and backward once: `products`, `attention`, `elementwise` and `host` (what the
    device waits for the host to start operators) are its parts. recompute: what runs a second time,
    without its communication. exposed: communication that is waited for, by axis (tp, cp, ep, pp,
    dp); hidden: what runs beside computation. bubble: idle for lack of a micro-batch.
    mfu: share of the device's peak that the model's own operations are; hfu: with recomputed ones.
    flops_per_device: model FLOP/s of a device. error: how far off such predictions have been.
    """

    total: float
    compute: float
    recompute: float
    products: float
    attention: float
    elementwise: float
    host: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    bubble: float
    optimizer: float
    data: float
    microbatches: int
    tokens_per_second: float
    flops_per_device: float
    mfu: float
    hfu: float
    error: float = DENSE_ERROR

    @property
    def range(self) -> tuple[float, float]:
        """Seconds between which the step is expected: `total` less and more `error` of it."""
        return self.total * (1 - self.error), self.total * (1 + self.error)

    @property
    def pieces(self) -> tuple[tuple[str, float], ...]:
        """(what, seconds) that add up to `total`, for a waterfall; nothing that takes no time."""
        found = [
            ("products", self.products),
            ("attention", self.attention),
            ("elementwise", self.elementwise),
            ("host", self.host),
            ("recompute", self.recompute),
            *((f"{axis} exposed", self.exposed.get(axis, 0.0)) for axis in AXES),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
            ("data", self.data),
        ]
        return tuple((what, seconds) for what, seconds in found if seconds > 0)
