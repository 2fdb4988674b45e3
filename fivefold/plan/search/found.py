"""One strategy, judged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.time.result import StepTime
from fivefold.plan.workload import Strategy


@dataclass(frozen=True, eq=False)
class Found:
    """A strategy on the devices of `job`: memory of each pipeline rank, and the time of a step."""

    job: Job
    strategy: Strategy
    memory: tuple[Ledger, ...]
    time: StepTime

    @cached_property
    def fullest(self) -> Ledger:
        """The rank that has the most."""
        return max(self.memory, key=lambda each: each.total)

    @cached_property
    def bytes(self) -> float:
        """Of the fullest rank."""
        return float(self.fullest.total)

    @property
    def room(self) -> float:
        """Bytes that the fullest device has left; below 0: it does not fit."""
        return self.job.cluster.device.memory - self.bytes

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.room >= 0

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.total

    @property
    def device_seconds(self) -> float:
        """What a step costs, whatever a device's hour does."""
        return self.seconds * self.job.devices

    def said(self) -> str:
        """The strategy in a line."""
        return say(self.strategy)


def say(strategy: Strategy) -> str:
    """A strategy as `--layout` reads it."""
    return f"{strategy.layout},micro_batch={strategy.micro_batch},recompute={strategy.recompute}"


def judge(
    job: Job,
    strategy: Strategy,
    estimators: Estimators,
    memory: tuple[Ledger, ...] | None = None,
) -> Found:
    """Ledger (unless it is known) and time of a strategy. Raises what the estimators raise."""
    if memory is None:
        memory = estimators.ledger(job.shape, job.training, strategy, job.software)
    time = estimators.step_time(job.shape, job.training, strategy, job.cluster, job.software)
    return Found(job, strategy, memory, time)
