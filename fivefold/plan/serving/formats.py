"""Number formats of weights, keys and values: bytes an element, and what computes with them."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.core.errors import PlanError, nearest
from fivefold.plan.hardware.device import Device
from fivefold.plan.memory.serving import BITS

BYTES: Mapping[str, float] = {form: float(bits / 8) for form, bits in BITS.items()}
"""Bytes of an element, its share of the scales included."""

WEIGHT_FORMATS = tuple(BYTES)
KV_FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "nvfp4")

_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "bf16", "fp32"),
    "int4": ("bf16", "fp16", "fp32"),
    "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
    "nvfp4": ("fp4", "fp8", "bf16", "fp16"),
    "mxfp4": ("fp4", "fp8", "bf16", "fp16"),
}


def bytes_of(form: str) -> float:
    """Bytes of an element. Raises PlanError for a format that is not known."""
    if form not in BYTES:
        raise PlanError(f"unknown number format {form!r}", nearest(form, BYTES))
    return BYTES[form]


def product_form(device: Device, form: str) -> str:
    """The format in which this device multiplies weights of `form`: the first that it has.

    A device without FP8 products stores such weights and multiplies in 16 bits.
    """
    bytes_of(form)
    for known in _PRODUCTS[form]:
        if known in device.peak:
            return known
    raise PlanError(
        f"{device.name} has no products for weights in {form}",
        f"it has {', '.join(sorted(device.peak))}",
    )


def is_quantized(form: str) -> bool:
    """Whether activations are rounded to the format before each product (a kernel of its own)."""
    return form in ("fp8", "mxfp8", "nvfp4", "mxfp4")
