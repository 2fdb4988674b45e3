"""Devices in domains of fast links, domains joined by a network."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.link import Link


@dataclass(frozen=True)
class Cluster:
    """`domain` devices reach each other over `inside` (NVLink), all others over `between`.

    A domain is a server with eight GPUs, or a rack of 72 (GB200 NVL72), whatever `per_node` is.
    `host` joins a device and its host's memory.
    """

    name: str
    device: Device
    nodes: int
    per_node: int
    domain: int
    inside: Link
    between: Link
    host: Link
    failures: float = 0.0  # interruptions of a job per device and hour
    restart: float = 600.0  # seconds from an interruption until training goes on

    @property
    def devices(self) -> int:
        """All devices."""
        return self.nodes * self.per_node

    def spread(self, ranks: int, stride: int) -> tuple[int, int]:
        """How a group of `ranks`, `stride` apart, lies: (members in one domain, domains)."""
        inside = max(1, min(ranks, self.domain // stride))
        while ranks % inside:
            inside -= 1
        return inside, ranks // inside
