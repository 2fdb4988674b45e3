"""A timeline as numbers that can be written to a file and read again: simulated or measured."""

from __future__ import annotations

import re
from typing import Any, cast

from fivefold.axes.pp.action import Action, Kind
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.timeline import Span, Timeline
from fivefold.core.errors import DataError

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def to_numbers(timeline: Timeline) -> dict[str, Any]:
    """Everything about the schedule and its times, for JSON; actions as `2F7`: stage, pass, micro-batch."""
    s = timeline.schedule
    ranks = range(s.ranks)
    return {
        "schedule": s.name,
        "ranks": s.ranks,
        "stages": s.stages,
        "directions": s.directions,
        "microbatches": s.microbatches,
        "placement": list(s.placement),
        "time": timeline.makespan,
        "bubble_share": timeline.bubble_share,
        "busy": [timeline.busy(rank) for rank in ranks],
        "idle_inside": [timeline.idle_inside(rank) for rank in ranks],
        "peak_in_flight": [timeline.peak_in_flight(rank) for rank in ranks],
        "peak_share": [timeline.peak_share(rank) for rank in ranks],
        "orders": [[str(action) for action in order] for order in s.orders],
        "spans": [
            {"rank": p.rank, "action": str(p.action), "start": p.start, "end": p.end}
            for p in timeline.spans
        ],
    }


def from_numbers(numbers: Any) -> Timeline:
    """The timeline of `to_numbers`. Raises DataError for anything else."""
    try:
        schedule = Schedule(
            name=str(numbers["schedule"]),
            ranks=int(numbers["ranks"]),
            stages=int(numbers["stages"]),
            microbatches=int(numbers["microbatches"]),
            placement=tuple(int(rank) for rank in numbers["placement"]),
            orders=tuple(tuple(map(_action, order)) for order in numbers["orders"]),
            directions=int(numbers["directions"]),
        )
        spans = tuple(
            Span(int(s["rank"]), _action(s["action"]), float(s["start"]), float(s["end"]))
            for s in numbers["spans"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _no_timeline(f"{type(error).__name__}: {error}") from error
    known = {(rank, action) for rank, order in enumerate(schedule.orders) for action in order}
    for span in spans:
        if (span.rank, span.action) not in known or span.end < span.start:
            raise _no_timeline(f"{span.action} of rank {span.rank} is not of the schedule")
    if not spans:
        raise _no_timeline("it has no spans")
    return Timeline(schedule, spans)


def _action(text: Any) -> Action:
    found = ACTION.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no action")
    return Action(cast(Kind, found[2]), int(found[1]), int(found[3]))


def _no_timeline(why: str) -> DataError:
    return DataError(
        f"this is no timeline of a pipeline ({why})",
        "give the JSON that `fivefold plan schedule --json` prints or a run has written",
    )
