"""The optimizer's step: it moves bytes, and hardly computes."""

from __future__ import annotations

from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.time.data import Held, Ways
from fivefold.plan.time.rates import Rates
from fivefold.plan.workload import Software

# Bytes per second that a device's share of its host reaches when the host updates: assumed, of eight
# shares of a server with 300 GB/s.
HOST_MEMORY = 40e9
ADAM = 28.0  # bytes: four fp32 numbers read, three written


def update(
    cluster: Cluster, layout: Layout, software: Software, rates: Rates, ways: Ways, holding: Held,
    element: int,
) -> float:  # fmt: skip
    """Seconds for the elements whose state this rank keeps."""
    owned = sum(elements / shards.ranks for elements, shards in ways.pairs(holding))
    if layout.offload == "none":
        return rates.pass_over(owned * software.update)
    moved = owned * (software.gradient_bytes + element)
    return moved / cluster.host.rate + owned * ADAM / HOST_MEMORY
