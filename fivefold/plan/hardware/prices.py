"""What an hour of a device was offered for: list prices of one place at one time."""

from __future__ import annotations

from dataclasses import dataclass

_SKYPILOT = "github.com/skypilot-org/skypilot-catalog, catalogs/v7"
_LAMBDA = f"Lambda, 8 in a server; {_SKYPILOT}/lambda/vms.csv at 11580132, read 2026-11-30"
_NEBIUS = f"Nebius; {_SKYPILOT}/nebius/vms.csv at 22fd1fea, read 2026-11-30"
_RUNPOD = f"RunPod; {_SKYPILOT}/runpod/vms.csv at 0727c2bd, read 2026-11-30"


@dataclass(frozen=True)
class Price:
    """US dollars for a device and hour: on demand, and where it may be taken away (spot)."""

    on_demand: float
    source: str
    spot: float | None = None


# Offers differ by factors of two to four between places, and change within months: give your own.
PRICES: dict[str, Price] = {
    "V100": Price(0.55, f"of 16 GB; {_LAMBDA}"),
    "V100-16GB": Price(0.55, _LAMBDA),
    "A100-40GB": Price(1.29, _LAMBDA),
    "A100-80GB": Price(
        1.79,
        "Lambda, 8 in a server, through Prime Intellect; "
        f"{_SKYPILOT}/primeintellect/vms.csv at 0e770cca, read 2026-11-30; spot: RunPod, "
        "deploybase.ai/articles/runpod-gpu-pricing of 2026-03-10",
        spot=1.39,
    ),
    "A100-PCIe": Price(1.64, _RUNPOD, spot=1.19),
    "H100": Price(2.95, _NEBIUS, spot=1.25),
    "H100-PCIe": Price(
        2.49,
        "Lambda, computespec.pages.dev/learn/pricing/cloud-gpu-pricing-explained; "
        "spot: RunPod, deploybase.ai/articles/runpod-gpu-pricing of 2026-03-10",
        spot=1.99,
    ),
    "H200": Price(3.50, _NEBIUS, spot=1.45),
    "GH200": Price(1.49, f"{_SKYPILOT}/lambda/vms.csv at 11580132, read 2026-11-30"),
    "B200": Price(
        5.50,
        f"{_NEBIUS}; spot: the lowest of lyceum.technology/magazine/nvidia-b200-gpu-cloud-"
        "pricing-2026 of 2026-03-11",
        spot=2.25,
    ),
    "B300": Price(
        6.10, "middle of 5.00 to 7.25 in ornnai.com/research/nvidia-b200-vs-b300, 2026"
    ),
    "GB200": Price(
        4.54, "Spheron, half a superchip; spheron.network/blog/nvidia-h200-vs-b200-vs-gb200, 2026-03-17"
    ),
    "MI300X": Price(
        1.99, "DigitalOcean; docs.digitalocean.com/products/droplets/details/pricing, 2026-05-28"
    ),
    "L40S": Price(
        1.55,
        f"{_NEBIUS}; spot: RunPod, deploybase.ai/articles/runpod-gpu-pricing of 2026-03-10",
        spot=0.79,
    ),
    "RTX4090": Price(
        0.60, "RunPod; deploybase.ai/articles/runpod-gpu-pricing of 2026-03-10", spot=0.34
    ),
}  # fmt: skip
