"""What a device's work takes, by its efficiency: the one place here that reads `Efficiency`."""

from __future__ import annotations

from fivefold.plan.hardware.device import Device
from fivefold.plan.serving.this import MeasuredDevice

GRAPH, GRAPH_BLACKWELL = 0.6, 0.42
"""Of a launch, what is left when kernels are replayed from a captured graph, as servers do. On
Blackwell kernels begin before those ahead of them have ended (programmatic dependent launch)."""
EAGER = 6.0
"""Launches that a kernel takes of the host when it is not replayed: an operator of PyTorch with the
Python around it, 30 us (vLLM's --enforce-eager takes 12 to 15 ms for the 32 layers of an 8B)."""
EXPERTS, EXPERTS_BLACKWELL = 0.8, 1.0
"""Of the bandwidth that large matrices are read with, what reading many small experts reaches."""
NARROW = {"fp8": 0.8, "int8": 0.8, "fp4": 0.7}
"""What products of narrow formats reach, of the share that those of 16 bits reach: power holds the
clock lower, and sums are scaled and widened as they go."""
PROCESSOR = 0.3
"""Of its memory's bandwidth, what a processor reaches where 16-bit numbers are widened and exp is
computed (docs/kernels.md: SwiGLU 25%, RMSNorm 38%, rotary embedding 43%)."""
FLOOR = 4.0
"""A product below a third of `small` is not slowed further by its tiles: memory bounds it."""


def product(
    device: Device, form: str, operations: float, moved: float, rows: float, experts: bool = False
) -> float:
    """Seconds of a matrix product: bound by operations or by memory, whichever is slower."""
    if isinstance(device, MeasuredDevice):
        elements = operations / (2 * max(rows, 1e-9))
        computing = operations / device.rate(form, rows, elements)
        return max(computing, moved / device.streaming(elements))
    found = device.efficiency
    computed = min(operations + found.small, FLOOR * operations)
    share = found.products * NARROW.get(form, 1.0)
    computing = computed / (device.flops(form) * share)
    reached = bandwidth(device)
    if experts:
        reached *= EXPERTS_BLACKWELL if _is_blackwell(device) else EXPERTS
    return max(computing, moved / reached)


def attention(device: Device, form: str) -> float:
    """FLOP/s of fused attention of prompts."""
    if isinstance(device, MeasuredDevice) and device.scoring:
        return device.scoring
    return device.flops(form) * device.efficiency.attention


def bandwidth(device: Device) -> float:
    """Bytes per second of large reads."""
    if isinstance(device, MeasuredDevice):
        return device.bandwidth
    return device.bandwidth * device.efficiency.bandwidth


def elementwise(device: Device) -> float:
    """Bytes per second of norms, activations and copies."""
    return bandwidth(device) * (PROCESSOR if isinstance(device, MeasuredDevice) else 1.0)


def reading(device: Device) -> float:
    """Bytes per second of keys and values that decode reads."""
    return device.reading if isinstance(device, MeasuredDevice) else bandwidth(device)


def launch(device: Device) -> float:
    """Seconds that a kernel replayed from a graph costs at least.

    A processor's step is one native call, which has none.
    """
    if isinstance(device, MeasuredDevice):
        return 0.0
    return device.efficiency.launch * (GRAPH_BLACKWELL if _is_blackwell(device) else GRAPH)


def eager(device: Device) -> float:
    """Seconds of the host for a kernel that is not replayed."""
    return 0.0 if isinstance(device, MeasuredDevice) else EAGER * device.efficiency.launch


def _is_blackwell(device: Device) -> bool:
    return "fp4" in device.peak
