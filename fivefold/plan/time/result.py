"""What a step takes, and what of it is spent on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AXES = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, seen from the pipeline rank that computes longest.

    total = compute + recompute + sum of exposed + bubble + optimizer + data.
    compute: forward and backward once: `products`, `attention`, `elementwise` and `host` (what the
    device waits for the host to start operators) are its parts. recompute: what runs a second time,
    without its communication. exposed: communication that is waited for, by axis (tp, cp, ep, pp,
    dp); hidden: what runs beside computation. bubble: idle for lack of a micro-batch.
    mfu: share of the device's peak that the model's own operations are; hfu: with recomputed ones.
    flops_per_device: model FLOP/s of a device.
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
    notes: tuple[str, ...] = field(default=())

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
