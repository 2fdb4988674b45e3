"""NVIDIA's Blackwell devices, one GPU each: of a GB200 superchip one of the two.

Rack figures of NVIDIA's sheets are divided by 72; "with sparsity" is halved.
"""

from __future__ import annotations

from fivefold.plan.hardware.catalogue_entry import GIB, entry
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import BLACKWELL

MIB = 2**20
_SEEN = "the capacity in torch's out-of-memory messages, as posted by many"

BLACKWELLS: tuple[Device, ...] = (
    entry(
        "B200",
        tera={
            "fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500,
            "int8": 4500, "fp4": 9000,
        },
        gib=178.35, terabytes=7.7, watts=1000, efficiency=BLACKWELL,
        source="NVIDIA HGX B200 data sheet (2025): 180 GB", memory_source=_SEEN,
    ),
    entry(
        "B300",
        tera={
            "fp64": 1.25, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500,
            "int8": 150, "fp4": 13_500,
        },
        gib=267.69, terabytes=7.75, watts=1100, efficiency=BLACKWELL,
        source="NVIDIA HGX B300 data sheet (2025): 108 PFLOP/s FP4 dense of eight; bandwidth as in "
        "aiconfigurator's systems/b300_sxm.yaml",
        memory_source=_SEEN,
    ),
    entry(
        "GB200",
        tera={
            "fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000,
            "int8": 5000, "fp4": 10_000,
        },
        gib=184.31, terabytes=8.0, watts=1200, efficiency=BLACKWELL,
        source="NVIDIA GB200 NVL72 data sheet (2025), a 72nd", memory_source=_SEEN,
    ),
    entry(
        "GB300",
        tera={
            "fp64": 1.4, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000,
            "int8": 165, "fp4": 15_000,
        },
        gib=284_208 * MIB / GIB * 0.9967, terabytes=8.0, watts=1400, efficiency=BLACKWELL,
        source="NVIDIA GB300 NVL72 data sheet (2025), a 72nd",
        memory_source="nvidia-smi says 284208 MiB; less the share that B300 does not hand out",
    ),
)  # fmt: skip
