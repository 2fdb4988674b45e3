"""Schedules by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.axes.pp.check import check
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.schedules import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zbv,
)
from fivefold.core.errors import LayoutError, nearest
from fivefold.core.layout import Layout

DEFAULT_VIRTUAL = 2
PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe.build,
    "1f1b": one_f_one_b.build,
    "zb-h1": zb_h1.build,
    "zbv": zbv.build,
    "dualpipe": dualpipe.build,
    "dualpipe-v": dualpipe_v.build,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipe-v")


def build_schedule(
    name: str, ranks: int, microbatches: int, virtual: int | None = None
) -> Schedule:
    """The checked schedule `name` for `ranks` ranks and `microbatches` micro-batches.

    `virtual` (stages a rank) is the interleaved schedule's alone, 2 by default; the others say it
    themselves. Raises LayoutError for an unknown name and for numbers that the schedule cannot take.
    """
    if name not in SCHEDULES:
        raise LayoutError(f"unknown pipeline schedule {name!r}", nearest(name, SCHEDULES))
    for what, number in (("ranks", ranks), ("micro-batches", microbatches)):
        if number < 1:
            raise LayoutError(f"a pipeline cannot have {number} {what}", "use 1 or more")
    if name == "interleaved":
        stages = DEFAULT_VIRTUAL if virtual is None else virtual
        return check(interleaved.build(ranks, microbatches, stages))
    if virtual not in (None, 1):
        raise LayoutError(
            f"virtual={virtual} is of the schedule interleaved alone, not of {name}",
            f"leave virtual out, or use interleaved instead of {name}",
        )
    return check(PLAIN[name](ranks, microbatches))


def placement_of(layout: Layout) -> Schedule:
    """A schedule of the layout's kind, for its stages and where they lie."""
    virtual = layout.virtual if layout.virtual > 1 else None
    return build_schedule(layout.schedule, layout.pp, 2 * layout.pp, virtual)
