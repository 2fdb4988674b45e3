"""A run's plan beside its records, line by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fivefold.axes.pp.timeline import Timeline
from fivefold.core.errors import PlanError
from fivefold.plan.calibrate.finished import Finished
from fivefold.plan.hardware.catalogue import device as catalogue_device
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.memory.ledger import ledger
from fivefold.plan.time.result import StepTime
from fivefold.plan.time.simulated import simulated_step
from fivefold.plan.time.step import step_time

# Interpreter, torch and its libraries in a rank on a CPU, whose memory is its resident set.
RUNTIME_BYTES = 420 * 2**20
Unit = Literal["s", "B", "1", "/s"]


@dataclass(frozen=True)
class Line:
    """One quantity. unit: seconds, bytes, a share, or per second; note: what is compared."""

    what: str
    unit: Unit
    predicted: float
    measured: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; of shares, the difference."""
        if self.measured is None:
            return None
        if self.unit == "1":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else None


def cluster_of_run(run: Finished) -> Cluster:
    """Where a run took place: its GPUs by their name, or this machine as it was measured.

    Raises PlanError where that machine is neither known nor measured.
    """
    ranks = run.strategy.layout.world_size
    name = str(run.hardware.get("device", ""))
    if "devices_here" in run.hardware:
        here = min(ranks, int(run.hardware["devices_here"]))
        try:
            return cluster(f"{ranks // here}x{here}x{catalogue_device(name).name}")
        except PlanError:
            return cluster(f"{ranks // here}x{here}xthis:cuda")
    return cluster(f"{ranks}xthis:cpu")


def compare(run: Finished, where: Cluster) -> tuple[StepTime, list[Line]]:
    """The predicted step, and every line that the records allow.

    Raises PlanError or LayoutError where the run cannot be planned on `where`.
    """
    step = predict(run, where)
    lines = [
        Line("step", "s", step.total, run.step_seconds, f"median of {run.steps} steps"),
        Line("tokens per second", "/s", step.tokens_per_second, run.tokens_per_second),
        Line("MFU", "1", step.mfu, run.mfu, "each against its own peak"),
        _memory(run, where),
    ]
    if run.timeline is not None and run.strategy.layout.pp > 1:
        _, timeline = simulated_step(run.shape, run.training, run.strategy, where, run.software)
        lines += _pipeline(timeline, run.timeline)
    lines += [Line(f"of the step: {what}", "s", seconds, None) for what, seconds in step.pieces]
    return step, lines


def predict(run: Finished, where: Cluster) -> StepTime:
    """What the planner says of the run's step."""
    return step_time(run.shape, run.training, run.strategy, where, run.software)


def _memory(run: Finished, where: Cluster) -> Line:
    """Of rank 0: tensors on a GPU; on a CPU the process, whose libraries are no tensors."""
    first = ledger(run.shape, run.training, run.strategy, run.software)[0]
    held = float(first.states + first.working)
    on_gpu = "devices_here" in run.hardware
    note = "of tensors" if on_gpu else "of the process, 420 MiB of it libraries"
    return Line(
        "peak memory of rank 0",
        "B",
        held + (0 if on_gpu else RUNTIME_BYTES),
        run.memory or None,
        note,
    )


def _pipeline(predicted: Timeline, measured: Timeline) -> Iterator[Line]:
    yield Line("bubble", "1", predicted.bubble_share, measured.bubble_share, "of all ranks' time")
    yield Line("pipeline", "s", predicted.makespan, measured.makespan, "one step's micro-batches")
    ours, theirs = _by_stage(predicted), _by_stage(measured)
    for stage, kind in sorted(set(ours) & set(theirs)):
        what = "forward" if kind == "F" else "backward"
        yield Line(
            f"stage {stage} {what}", "s", ours[stage, kind], theirs[stage, kind], "one micro-batch"
        )


def _by_stage(timeline: Timeline) -> dict[tuple[int, str], float]:
    """Mean seconds of a stage's forward, and of all of its backward, for a micro-batch."""
    total: dict[tuple[int, str], float] = defaultdict(float)
    count: dict[int, int] = defaultdict(int)
    for span in timeline.spans:
        kind = "F" if span.action.kind == "F" else "B"
        total[span.action.stage, kind] += span.end - span.start
        count[span.action.stage] += kind == "F"
    return {key: seconds / count[key[0]] for key, seconds in total.items() if count[key[0]]}
