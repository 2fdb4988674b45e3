"""What is asked of a plan, and by which functions a strategy is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.shape import ModelShape
from fivefold.plan.time.result import StepTime
from fivefold.plan.workload import Software, Strategy, Training


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch through the whole model, on the ranks that share its sequences.

    input: backward for the input, with what is computed again; weight: backward for the weights.
    """

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.input + self.weight

    @property
    def early(self) -> float:
        """What delays the other stages where weights can wait."""
        return max(0.0, self.forward + self.input - self.weight)


LedgerOf = Callable[[ModelShape, Training, Strategy, Software], tuple[Ledger, ...]]
TimeOf = Callable[[ModelShape, Training, Strategy, Cluster, Software], StepTime]
PassOf = Callable[[ModelShape, Training, Strategy, Cluster, Software], Pass]
KeptOf = Callable[[ModelShape, Training, Strategy, Software, bool], float]


@dataclass(frozen=True)
class Estimators:
    """What strategies are judged by, and what bounds are made of.

    ledger: memory of each pipeline rank. step_time: of a step. one_pass: of a strategy without
    pipeline. kept: bytes that a layer, dense or with experts, keeps of one micro-batch at least.
    """

    ledger: LedgerOf
    step_time: TimeOf
    one_pass: PassOf
    kept: KeptOf
    base: float = 0.0  # bytes that every ledger has beside state and activations
    fragments: float = 1.0  # what a byte of activations takes


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
