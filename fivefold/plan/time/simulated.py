"""The time of a step from the actions that training executes, each with its stage's own cost."""

from __future__ import annotations

from functools import lru_cache

from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.axes.pp.timeline import Timeline
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.shape import ModelShape
from fivefold.plan.time.result import StepTime
from fivefold.plan.time.step import Pieces, assemble, pieces
from fivefold.plan.workload import Software, Strategy, Training


def simulated_step(
    shape: ModelShape, training: Training, strategy: Strategy, cluster: Cluster, software: Software
) -> tuple[StepTime, Timeline]:
    """As `step_time`, and the timeline of one pipeline. Raises LayoutError where the schedule cannot
    take the micro-batches, and what `step_time` raises.
    """
    layout = strategy.layout
    found = pieces(shape, training, strategy, cluster, software)
    schedule = _schedule(layout.schedule, layout.pp, found.microbatches, layout.virtual)
    silent = simulate(schedule, costs(found, 0.0, False))
    timeline = simulate(schedule, costs(found, found.send, software.blocking_sends))
    waits = timeline.makespan - silent.makespan
    step = assemble(shape, training, strategy, cluster, software, found, silent.makespan, waits)
    return step, timeline


def costs(found: Pieces, send: float, blocking: bool) -> tuple[Costs, ...]:
    """Of each part. Where sends block, a rank is busy with one message a pass."""
    busy = send if blocking and len(found.timed) > 1 else 0.0
    return tuple(
        Costs(part.forward + busy, part.input + busy, part.weight, send - busy)
        for part in found.timed
    )


@lru_cache(maxsize=64)
def _schedule(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    if ranks == 1:
        return build_schedule("1f1b", 1, microbatches)
    return build_schedule(name, ranks, microbatches, virtual if virtual > 1 else None)
