"""What one device makes of work: operations, bytes and operators to seconds."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.plan.hardware.device import Device

NARROW = ("fp8", "mxfp8", "nvfp4", "fp4", "int8")  # formats of products alone

# Matrix units want rows of whole 16 bytes. A vocabulary of 50,257 words makes its product three times as
# slow on A100 (vTrain's published times: 80 TFLOP/s, and 250 of 50,256 in halves).
UNALIGNED = 3.0
# Products in 8 bits are further from their peak: on H100 about 0.68 of it at best, those in 16 bits 0.77.
NARROW_SHARE = 0.9
# A product of less than a third of `small` is not slowed further by what it leaves empty.
FLOOR = 4.0


@dataclass(frozen=True)
class Rates:
    """Of one device: FLOP/s and bytes per second that kernels reach.

    matrix: of large products in the format of the run. half: of products in 16 bits or wider, which
    scores of attention are made of whatever the format. small: FLOP that a product loses in filling
    and draining the device. launch: seconds a kernel takes at least. narrow: products are in 8 bits or fewer.
    """

    matrix: float
    half: float
    small: float
    memory: float
    attention: float
    launch: float
    narrow: bool = False

    def product(self, flops: float, moved: float, aligned: bool = True) -> float:
        """Seconds of a matrix product of `flops` that reads and writes `moved` bytes.

        Not `aligned`: a row of a matrix does not start at a multiple of 16 bytes.
        """
        rate = self.matrix if aligned else self.matrix / UNALIGNED
        computed = min(flops + self.small, FLOOR * flops)
        return self.launch + max(computed / rate, moved / self.memory)

    def scores(self, flops: float, moved: float) -> float:
        """The same of products with a sequence's scores, many and small: they multiply over no more
        than a head's dims, too few steps to hide reading and writing behind them.
        """
        return self.launch + flops / self.half + moved / self.memory

    def pass_over(self, moved: float, kernels: int = 1) -> float:
        """Seconds of elementwise kernels."""
        return moved / self.memory + kernels * self.launch


def rates(device: Device, form: str) -> Rates:
    """Of a device computing in `form`. Raises PlanError for a format that it does not have."""
    found = device.efficiency
    wide = next((f for f in ("bf16", "fp16", "fp32") if f in device.peak), form)
    half = device.flops(wide if form in NARROW else form)
    peak = (NARROW_SHARE if form in NARROW else 1.0) * device.flops(
        "fp8" if form == "mxfp8" and form not in device.peak else form
    )
    return Rates(
        matrix=peak * found.products,
        half=half * found.products,
        small=found.small,
        memory=device.bandwidth * found.bandwidth,
        attention=half * found.attention,
        launch=found.launch,
        narrow=form in NARROW,
    )
