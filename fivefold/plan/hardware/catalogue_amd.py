"""AMD's devices. Peaks are of dense products."""

from __future__ import annotations

from fivefold.plan.hardware.catalogue_entry import entry
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import CDNA3

_MI300 = {
    "fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9,
    "int8": 2614.9,
}  # fmt: skip

AMD: tuple[Device, ...] = (
    entry(
        "MI300X", tera=_MI300, gib=191.69, terabytes=5.3, watts=750, efficiency=CDNA3,
        source="AMD Instinct MI300X data sheet (2023)",
        memory_source="the capacity in torch's out-of-memory messages: 191.69 to 191.98 GiB",
        clock="the peak is at 2.1 GHz, which 750 W hold in short products alone",
    ),
    entry(
        "MI325X", tera=_MI300, gib=255.6, terabytes=6.0, watts=1000, efficiency=CDNA3,
        source="AMD Instinct MI325X data sheet (2024): 256 GB",
        memory_source="the sheet's, less what MI300X does not hand out",
    ),
)  # fmt: skip
