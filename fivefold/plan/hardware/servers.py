"""The machine that a device is usually found in: how many, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.plan.hardware.link import Link

# NCCL's busbw of large messages over the wire's rate, in one direction.
_NVLINK_A100 = "232.5 of 300 GB/s on eight A100: NVIDIA/nccl-tests issue 175"
_NVLINK_H100 = "370 of 450 GB/s, protocol overhead about 20%: NVIDIA/nccl-tests issue 212"
_FABRIC = "86 to 96 of 100 GB/s on four 200 Gb/s ports: NVIDIA/nccl-tests issues 119 and 175"


# Latencies: nccl-tests' small all-reduces, about 25 us on eight GPUs of an NVLink, 40 us on two such
# servers: a start, and a message for each hop of the ring.
def _link(
    name: str, gigabytes: float, microseconds: float, start: float, efficiency: float, source: str
) -> Link:
    return Link(
        name=name,
        bandwidth=gigabytes * 1e9,
        latency=microseconds * 1e-6,
        start=start * 1e-6,
        efficiency=efficiency,
        source=source,
    )


def _nvlink(generation: int, gigabytes: float, efficiency: float, source: str) -> Link:
    link = _link(f"NVLink {generation}", gigabytes, 1, 10, efficiency, source)
    return replace(link, multicast=generation >= 4)  # NVLink SHARP, which NCCL uses since 2.17


def _pcie(generation: int, gigabytes: float) -> Link:
    source = f"PCIe {generation} x16; three quarters are reached past headers and completions"
    return _link(f"PCIe {generation}", gigabytes, 2, 10, 0.75, source)


def fabric(gigabits: float, name: str = "InfiniBand") -> Link:
    """A network port of `gigabits` per second for each device."""
    microseconds, start = (4, 20) if name == "InfiniBand" else (15, 40)
    return _link(f"{name} {gigabits:g} Gb/s", gigabits / 8, microseconds, start, 0.9, _FABRIC)


PCIE3, PCIE4, PCIE5, PCIE6 = (
    _pcie(3, 15.75), _pcie(4, 31.5), _pcie(5, 63.0), _pcie(6, 121.0),
)  # fmt: skip
NVLINK2 = _nvlink(2, 150, 0.78, "like A100's")
NVLINK3 = _nvlink(3, 300, 0.775, _NVLINK_A100)
NVLINK3_CUT = _nvlink(3, 200, 0.775, "A800 has 8 of 12 links; efficiency like A100's")
NVLINK4 = _nvlink(4, 450, 0.82, _NVLINK_H100)
NVLINK4_CUT = _nvlink(4, 200, 0.80, "H800 has 8 of 18 links; DeepSeek-V3 (2412.19437): 160 GB/s")
NVLINK5 = _nvlink(5, 900, 0.80, "1.8 TB/s in both directions; efficiency like Hopper's")
INFINITY = _link(
    "Infinity Fabric", 448, 2, 15, 0.70, "seven links of 64 GB/s to the seven others; 70% assumed"
)
C2C = _link("NVLink-C2C", 450, 1, 5, 0.85, "NVIDIA GH200 data sheet")
C2C_HALF = _link("NVLink-C2C", 225, 1, 5, 0.85, "900 GB/s in both directions for two GPUs")
# Cards without peer access go through host memory: once in, once out, over the same slot.
THROUGH_HOST = _link("PCIe 4 through host", 31.5, 5, 15, 0.4, "two copies a message, assumed")


# Interruptions of a job per device and hour: Llama 3 (2407.21783), section 3.3.4: 419 in 54 days of
# 16,384 H100.
FAILURES = 419 / (54 * 24 * 16_384)


@dataclass(frozen=True)
class Server:
    """`per_node` devices share a host; `domain` reach each other over `inside` (72 of an NVL72).

    `most` is the largest number of devices in one host that is built.
    """

    per_node: int
    domain: int
    inside: Link
    between: Link
    host: Link
    source: str
    most: int = 8


_DGX = "8 devices and 8 ports, as in NVIDIA's DGX"
_RACK = "18 trays of 4, all on one NVLink"
_CLOUD = "8 cards in a host, the network of cloud instances"

SERVERS: dict[str, Server] = {
    "V100": Server(
        8, 8, NVLINK2, fabric(50), PCIE3, "DGX-1: four 100 Gb/s ports for 8; hybrid cube mesh", 16
    ),
    "A100-40GB": Server(8, 8, NVLINK3, fabric(200), PCIE4, f"{_DGX} A100", 16),
    "A100-80GB": Server(8, 8, NVLINK3, fabric(200), PCIE4, f"{_DGX} A100", 16),
    "A100-PCIe": Server(8, 8, PCIE4, fabric(50), PCIE4, "8 cards, without NVLink bridges"),
    "A800": Server(8, 8, NVLINK3_CUT, fabric(200), PCIE4, "like DGX A100"),
    "A10": Server(
        8, 8, PCIE4, fabric(12.5, "Ethernet"), PCIE4, f"{_CLOUD}: g5.48xlarge, 100 Gb/s for 8"
    ),
    "H100": Server(8, 8, NVLINK4, fabric(400), PCIE5, f"{_DGX} H100"),
    "H100-PCIe": Server(8, 8, PCIE5, fabric(100), PCIE5, "8 cards, without NVLink bridges"),
    "H800": Server(8, 8, NVLINK4_CUT, fabric(400), PCIE5, "DeepSeek-V3 (2412.19437), section 3.1"),
    "H20": Server(8, 8, NVLINK4, fabric(400), PCIE5, "like DGX H100"),
    "H200": Server(8, 8, NVLINK4, fabric(400), PCIE5, f"{_DGX} H200"),
    "GH200": Server(
        1, 1, NVLINK4, fabric(400), C2C, "one superchip and one port", 2
    ),
    "B200": Server(8, 8, NVLINK5, fabric(400), PCIE5, f"{_DGX} B200"),
    "B300": Server(8, 8, NVLINK5, fabric(800), PCIE6, f"{_DGX} B300"),
    "GB200": Server(4, 72, NVLINK5, fabric(400), C2C_HALF, _RACK),
    "GB300": Server(4, 72, NVLINK5, fabric(800), C2C_HALF, _RACK),
    "MI300X": Server(8, 8, INFINITY, fabric(400), PCIE5, "8 devices and 8 ports"),
    "MI325X": Server(8, 8, INFINITY, fabric(400), PCIE5, "8 devices and 8 ports"),
    "L40S": Server(8, 8, PCIE4, fabric(50, "Ethernet"), PCIE4, f"{_CLOUD}: g6e.48xlarge, 400 Gb/s"),
    "L4": Server(8, 8, PCIE4, fabric(12.5, "Ethernet"), PCIE4, f"{_CLOUD}: g6.48xlarge, 100 Gb/s"),
    "RTX4090": Server(
        8, 8, THROUGH_HOST, fabric(12.5, "Ethernet"), PCIE4, "8 cards, 100 Gb/s Ethernet for all"
    ),
}  # fmt: skip
SERVERS["V100-16GB"] = SERVERS["V100"]
