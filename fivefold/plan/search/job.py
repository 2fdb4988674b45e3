"""What is asked of a plan, and by which functions a strategy is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Software, Strategy, Training


class Memory(Protocol):
    """What a search reads of a rank's ledger: bytes."""

    @property
    def states(self) -> int | float:
        """Parameters, gradients and optimizer."""

    @property
    def total(self) -> int | float:
        """All of it."""


class Time(Protocol):
    """What a search reads of a step's time: seconds."""

    @property
    def total(self) -> float:
        """The step."""

    @property
    def compute(self) -> float:
        """Forward and backward of a rank, without recomputation and waiting."""

    @property
    def recompute(self) -> float:
        """What is computed a second time."""

    @property
    def exposed(self) -> Mapping[str, float]:
        """By axis: communication that is waited for."""


LedgerOf = Callable[[ModelShape, Training, Strategy, Software], tuple[Memory, ...]]
TimeOf = Callable[[ModelShape, Training, Strategy, Cluster, Software], Time]


@dataclass(frozen=True)
class Estimators:
    """Memory of each pipeline rank, and the time of a step."""

    ledger: LedgerOf
    step_time: TimeOf


@dataclass(frozen=True)
class Job:
    """A training run on a cluster."""

    shape: ModelShape
    training: Training
    cluster: Cluster
    software: Software

    @property
    def devices(self) -> int:
        """All of the cluster."""
        return self.cluster.devices

    def on(self, nodes: int) -> Job:
        """The same on so many of its nodes."""
        return replace(self, cluster=shrunk(self.cluster, nodes))


def shrunk(cluster: Cluster, nodes: int) -> Cluster:
    """`nodes` of a cluster: a domain (a rack of NVLink) is no larger than they are."""
    domain = min(cluster.domain, nodes * cluster.per_node)
    return replace(
        cluster,
        nodes=nodes,
        domain=domain,
        name=cluster.name if nodes == cluster.nodes else f"{nodes} of {cluster.name}",
    )
