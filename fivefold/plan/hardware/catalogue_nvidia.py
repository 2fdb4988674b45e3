"""NVIDIA's devices for servers before Blackwell, and what of consumer cards is used like them.

Peaks are of dense products: half of what a data sheet says "with sparsity". Memory is what CUDA
says that a process may have: less than the sheet's, by ECC and what the driver keeps.
"""

from __future__ import annotations

from fivefold.plan.hardware.catalogue_entry import entry
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.efficiency import ADA, AMPERE, HOPPER, VOLTA

_SEEN = "the capacity in torch's out-of-memory messages, as posted by many"
_A100 = {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624}
_H100 = {
    "fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9,
    "int8": 1978.9,
}  # fmt: skip
_A100_SHEET = "NVIDIA A100 data sheet, nvidia-us-2188504-web (2021)"
_H100_SHEET = "NVIDIA H100 data sheet (2023) and Hopper white paper, table 2"

NVIDIA: tuple[Device, ...] = (
    entry(
        "V100", tera={"fp64": 7.8, "fp32": 15.7, "fp16": 125}, gib=31.73, terabytes=0.9, watts=300,
        efficiency=VOLTA, source="NVIDIA V100 data sheet (2020): SXM2, 32 GB", memory_source=_SEEN,
        formats="no bf16: fp16 with loss scaling",
    ),
    entry(
        "V100-16GB", tera={"fp64": 7.8, "fp32": 15.7, "fp16": 125}, gib=15.77, terabytes=0.9,
        watts=300, efficiency=VOLTA, source="NVIDIA V100 data sheet (2020): SXM2, 16 GB",
        memory_source=_SEEN, formats="no bf16: fp16 with loss scaling",
    ),
    entry(
        "A100-40GB", tera=_A100, gib=39.39, terabytes=1.555, watts=400, efficiency=AMPERE,
        source=f"{_A100_SHEET}: SXM4, 40 GB", memory_source=_SEEN,
    ),
    entry(
        "A100-80GB", tera=_A100, gib=79.15, terabytes=2.039, watts=400, efficiency=AMPERE,
        source=f"{_A100_SHEET}: SXM4, 80 GB", memory_source=_SEEN,
    ),
    entry(
        "A100-PCIe", tera=_A100, gib=79.15, terabytes=1.935, watts=300, efficiency=AMPERE,
        source=f"{_A100_SHEET}: PCIe, 80 GB", memory_source=_SEEN,
        clock="300 W hold it below the SXM's clock in long products",
    ),
    entry(
        "A800", tera=_A100, gib=79.15, terabytes=2.039, watts=400, efficiency=AMPERE,
        source="NVIDIA A800 data sheet (2022): A100 with NVLink of 400 GB/s", memory_source=_SEEN,
    ),
    entry(
        "A10", tera={"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125, "int8": 250},
        gib=22.06, terabytes=0.6, watts=150, efficiency=AMPERE, source="NVIDIA A10 data sheet (2021)",
        memory_source=_SEEN,
    ),
    entry(
        "H100", tera=_H100, gib=79.10, terabytes=3.35, watts=700, efficiency=HOPPER,
        source=f"{_H100_SHEET}: SXM5, 80 GB", memory_source=_SEEN,
    ),
    entry(
        "H100-PCIe",
        tera={
            "fp64": 51, "fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513, "int8": 1513,
        },
        gib=79.10, terabytes=2.0, watts=350, efficiency=HOPPER,
        source=f"{_H100_SHEET}: PCIe, 80 GB", memory_source=_SEEN,
    ),
    entry(
        "H800", tera={**_H100, "fp64": 1.0}, gib=79.10, terabytes=3.35, watts=700,
        efficiency=HOPPER, source="NVIDIA H800 data sheet (2023): H100 with NVLink of 400 GB/s",
        memory_source=_SEEN,
    ),
    entry(
        "H20",
        tera={"fp64": 1.0, "fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296, "int8": 296},
        gib=95.00, terabytes=4.0, watts=400, efficiency=HOPPER,
        source="NVIDIA H20 data sheet (2024), as reported", memory_source=_SEEN,
        power="boards of 500 W are seen too",
    ),
    entry(
        "H200", tera=_H100, gib=139.80, terabytes=4.8, watts=700, efficiency=HOPPER,
        source="NVIDIA H200 data sheet (2024): SXM, 141 GB", memory_source=_SEEN,
    ),
    entry(
        "GH200", tera=_H100, gib=94.50, terabytes=4.0, watts=900, efficiency=HOPPER,
        source="NVIDIA GH200 data sheet (2023): 96 GB HBM3; watts with the Grace processor",
        memory_source=_SEEN, variants="144 GB HBM3e has 4.9 TB/s",
    ),
    entry(
        "L40S", tera={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733, "int8": 733},
        gib=44.40, terabytes=0.864, watts=350, efficiency=ADA,
        source="NVIDIA L40S data sheet (2023)", memory_source=_SEEN,
    ),
    entry(
        "L4", tera={"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242, "int8": 242},
        gib=22.03, terabytes=0.3, watts=72, efficiency=ADA, source="NVIDIA L4 data sheet (2023)",
        memory_source=_SEEN,
    ),
    entry(
        "RTX4090",
        tera={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "int8": 660.6},
        gib=23.65, terabytes=1.008, watts=450, efficiency=ADA,
        source="NVIDIA Ada GPU architecture white paper (2023), appendix A; sums in fp32",
        memory_source=_SEEN,
    ),
)  # fmt: skip
