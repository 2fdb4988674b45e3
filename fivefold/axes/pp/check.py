"""What every schedule must hold, whoever wrote it."""

from __future__ import annotations

from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.simulate import simulate
from fivefold.core.errors import LayoutError

WHOLE = (["F", "B"], ["F", "I", "W"])  # the passes of a micro-batch through a stage, in order


def check(schedule: Schedule) -> Schedule:
    """Return `schedule`; raise LayoutError at the first thing wrong with it.

    Every stage on one rank does for each of its micro-batches one F and after it one B, or an I and
    after it a W, and nothing else; and following the orders no rank ever waits in a circle.
    """
    for rank, order in enumerate(schedule.orders):
        passes: dict[tuple[int, int], list[str]] = {
            (stage, microbatch): []
            for stage in schedule.held(rank)
            for microbatch in schedule.microbatches_of(stage)
        }
        for action in order:
            key = action.stage, action.microbatch
            if key not in passes:
                raise _wrong(schedule, f"rank {rank} has no {action.in_words}")
            passes[key].append(action.kind)
        for (stage, microbatch), kinds in passes.items():
            if kinds not in WHOLE:
                raise _wrong(
                    schedule,
                    f"rank {rank} does {' '.join(kinds) or 'nothing'} for micro-batch "
                    f"{microbatch} on stage {stage}",
                )
    simulate(schedule)
    return schedule


def _wrong(schedule: Schedule, what: str) -> LayoutError:
    return LayoutError(
        f"schedule {schedule.name} is wrong: {what}",
        "every stage does F, then B (or I, then W) once for each micro-batch",
    )
