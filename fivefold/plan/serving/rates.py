"""What a device's work takes, by its efficiency: the one place here that reads `Efficiency`."""

from __future__ import annotations

from fivefold.plan.hardware.device import Device


GRAPH = 0.5
"""Of a launch, what is left when kernels are replayed from a captured graph, as servers do."""
FLOOR = 4.0
"""A product below a third of `small` is not slowed further by its tiles: memory bounds it."""


def product(device: Device, form: str, operations: float, moved: float) -> float:
    """Seconds of a matrix product: bound by operations or by memory, whichever is slower."""
    found = device.efficiency
    computed = min(operations + found.small, FLOOR * operations)
    computing = computed / (device.flops(form) * found.products)
    return max(computing, moved / bandwidth(device))


def attention(device: Device, form: str) -> float:
    """FLOP/s of fused attention."""
    return device.flops(form) * device.efficiency.attention


def bandwidth(device: Device) -> float:
    """Bytes per second of large reads."""
    return device.bandwidth * device.efficiency.bandwidth


def launch(device: Device) -> float:
    """Seconds that a kernel costs at least."""
    return GRAPH * device.efficiency.launch
