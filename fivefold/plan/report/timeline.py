"""The pipeline of a strategy as a picture, from the actions that training would execute."""

from __future__ import annotations

from dataclasses import replace

from fivefold.axes.pp.svg import svg
from fivefold.axes.pp.timeline import Timeline
from fivefold.plan.search.found import Found
from fivefold.plan.search.valid import stages_of, takes
from fivefold.plan.time.simulated import simulated_step

SHORT = 0.1  # of an action: messages that take less would only hide what is under them
MOST_ACTIONS = 4000  # of all ranks: a page with more is slow to open


def timeline(found: Found) -> Timeline | None:
    """Of all micro-batches, or of as many as can be drawn; None without a pipeline."""
    job, strategy = found.job, found.strategy
    if strategy.layout.pp == 1:
        return None
    count = drawn(found)
    batch = count * strategy.micro_batch * strategy.layout.dp
    training = replace(job.training, global_batch=batch)
    line = simulated_step(job.shape, training, strategy, job.cluster, job.software)[1]
    shortest = SHORT * line.short_action
    messages = tuple(m for m in line.messages if m.end - m.start >= shortest)
    return replace(line, messages=messages)


def drawn(found: Found) -> int:
    """Micro-batches that are drawn: all, or the most that the schedule takes and a page does."""
    layout, count = found.strategy.layout, found.time.microbatches
    fitting = [
        m
        for m in range(1, count + 1)
        if takes(layout.schedule, layout.pp, m) and 3 * m * stages_of(layout) <= MOST_ACTIONS
    ]
    return max(fitting, default=count)


def picture(found: Found) -> tuple[str, str] | None:
    """(SVG, what it shows); None without a pipeline."""
    line = timeline(found)
    if line is None:
        return None
    layout, count = found.strategy.layout, found.time.microbatches
    shown = line.schedule.microbatches
    part = (
        ""
        if shown == count
        else f", the first {shown} of {count} micro-batches as a step of their own"
    )
    title = f"{layout.schedule}: {layout.pp} ranks, {stages_of(layout)} stages{part}"
    return svg(line, title), title
