"""One accelerator (or processor), as its data sheet and measurements say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.core.errors import PlanError, nearest
from fivefold.plan.hardware.efficiency import Efficiency


@dataclass(frozen=True)
class Device:
    """Rates are per second, sizes in bytes, of one device (of GB200: one GPU of the two).

    `peak` maps a number format (fp32, tf32, bf16, fp16, fp8, fp4, int8) to FLOP/s of dense matrix
    products, without structured sparsity. `source` says where all that comes from.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    efficiency: Efficiency
    watts: float = 0.0  # at full load; 0: not known
    price: float | None = None  # US dollars an hour on demand
    spot_price: float | None = None
    source: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    def flops(self, form: str) -> float:
        """FLOP/s of products in `form`. Raises PlanError for a format the device does not have."""
        if form not in self.peak:
            raise PlanError(
                f"{self.name} has no products in {form}", nearest(form, tuple(self.peak))
            )
        return self.peak[form]
