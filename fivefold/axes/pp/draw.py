"""A timeline as text: one line a rank, one cell a unit of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rich.text import Text

from fivefold.axes.pp.action import MEANING, Action, Kind
from fivefold.axes.pp.timeline import Span, Timeline

STYLE: dict[Kind, str] = {
    "F": "black on bright_blue",
    "B": "black on bright_green",
    "I": "black on bright_cyan",
    "W": "black on bright_magenta",
}
IDLE, ON_ITS_WAY, GOES_ON = ".", "~", "="
MOST_CELLS = 400


@dataclass(frozen=True)
class _Grid:
    """How a timeline is cut into cells: `unit` of time and `width` of characters each."""

    unit: float
    cells: int
    width: int


def draw(timeline: Timeline, width: int, unit: float | None = None) -> Text:
    """Lines of at most `width` characters, below each other where the time is longer.

    A cell is `unit` of time, by default that of a short action. An action starts with its kind
    and micro-batch (and a letter for the stage, where a rank has several) and goes on as `=`; `.`
    is idle, `~` idle while a message for this rank travels. What is shorter than a cell may not show.
    """
    label = max(len(_label(timeline, span.action)) for span in timeline.spans)
    name = len(f"rank {timeline.schedule.ranks - 1} ")
    a_line = max(1, (width - name - 1) // (label + 1))
    unit = unit or max(timeline.short_action, timeline.makespan / MOST_CELLS)
    cells = max(1, ceil(timeline.makespan / unit - 1e-9))
    grid = _Grid(unit, cells, label + 1)
    text = Text()
    for start in range(0, cells, a_line):
        if start:
            text.append("\n")
        for rank in range(timeline.schedule.ranks):
            text.append(f"{f'rank {rank}':<{name}}|")
            for cell in list(_row(timeline, rank, grid))[start : start + a_line]:
                text.append_text(cell)
            text.append("\n")
    return text


def legend(timeline: Timeline) -> str:
    """What the letters mean, of those that occur."""
    kinds = [k for k in MEANING if any(s.action.kind == k for s in timeline.spans)]
    parts = [f"{kind} {MEANING[kind]}" for kind in kinds]
    parts += [f"{GOES_ON} goes on", f"{IDLE} idle"]
    if any(m.end > m.start for m in timeline.messages):
        parts.append(f"{ON_ITS_WAY} idle, a message is on its way")
    return ", ".join(parts)


def _row(timeline: Timeline, rank: int, grid: _Grid) -> Iterator[Text]:
    spans = iter(timeline.of(rank))
    span = next(spans, None)
    shown: Span | None = None
    for cell in range(grid.cells):
        middle = (cell + 0.5) * grid.unit
        while span is not None and span.end <= middle:
            span = next(spans, None)
        if span is None or span.start > middle:
            mark = ON_ITS_WAY if _coming(timeline, rank, middle) else IDLE
            yield Text(f"{mark:<{grid.width}}")
            continue
        goes_on = span.end > (cell + 1.5) * grid.unit
        label = "" if span is shown else _label(timeline, span.action)
        shown = span
        yield Text(_cell(label, goes_on, grid.width), style=STYLE[span.action.kind])


def _cell(label: str, goes_on: bool, width: int) -> str:
    """An action's first cell has its label, its last one ends in a space."""
    if goes_on:
        return label.ljust(width, GOES_ON)
    return (label or GOES_ON * (width - 1)).ljust(width)


def _coming(timeline: Timeline, rank: int, moment: float) -> bool:
    return any(m.target == rank and m.start <= moment < m.end for m in timeline.messages)


def _label(timeline: Timeline, action: Action) -> str:
    return f"{action.kind}{action.microbatch}{letter(timeline, action.stage)}"


def letter(timeline: Timeline, stage: int) -> str:
    """a, b, … for the first, second, … stage of a rank; nothing where each has one."""
    held = timeline.schedule.held(timeline.schedule.placement[stage])
    return "" if len(held) == 1 else chr(ord("a") + held.index(stage))
