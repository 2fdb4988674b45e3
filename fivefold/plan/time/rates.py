"""What one device makes of work: operations, bytes and operators to seconds."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.plan.hardware.device import Device

NARROW = ("fp8", "mxfp8", "nvfp4", "fp4", "int8")  # formats of products alone


@dataclass(frozen=True)
class Rates:
    """Of one device: FLOP/s and bytes per second that kernels reach.

    matrix: of large products in the format of the run. half: of products in 16 bits or wider, which
    scores of attention are made of whatever the format. small: FLOP that a product loses in filling
    and draining the device. launch: seconds a kernel takes at least.
    """

    matrix: float
    half: float
    small: float
    memory: float
    attention: float
    launch: float

    def product(self, flops: float, moved: float) -> float:
        """Seconds of a matrix product of `flops` that reads and writes `moved` bytes."""
        return max((flops + self.small) / self.matrix, moved / self.memory, self.launch)

    def scores(self, flops: float, moved: float) -> float:
        """The same for products with a sequence's scores, which are many and small."""
        return max((flops + self.small) / self.half, moved / self.memory, self.launch)

    def pass_over(self, moved: float, kernels: int = 1) -> float:
        """Seconds of elementwise kernels."""
        return max(moved / self.memory, kernels * self.launch)


def rates(device: Device, form: str) -> Rates:
    """Of a device computing in `form`. Raises PlanError for a format that it does not have."""
    found = device.efficiency
    wide = next((f for f in ("bf16", "fp16", "fp32") if f in device.peak), form)
    half = device.flops(wide if form in NARROW else form)
    peak = device.flops("fp8" if form == "mxfp8" and form not in device.peak else form)
    return Rates(
        matrix=peak * found.products,
        half=half * found.products,
        small=found.small,
        memory=device.bandwidth * found.bandwidth,
        attention=half * found.attention,
        launch=found.launch,
    )
