"""A line chart as an SVG element, and the points a pointer over it may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from fivefold.observe.axis import Axis, Kind, linear_axis, log_axis, step_axis, value_text
from fivefold.observe.series import Curve, downsample

WIDTH, HEIGHT = 600, 260
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 12, 40
LOG_FROM = 30  # highest over lowest value from which a logarithmic axis shows more
DOTS = 40  # a curve of fewer points has each marked


@dataclass(frozen=True)
class Line:
    """One curve. `style` is a class of the page's style sheet: raw, mean, held-out, ...; with
    `joined` False its points are dots alone.
    """

    label: str
    style: str
    points: Curve
    joined: bool = True


@dataclass(frozen=True)
class Across:
    """What a chart's curves run over where that is not steps."""

    name: str
    kind: Kind
    from_zero: bool = True
    may_log: bool = False
    limits: Sequence[float] = ()  # each a dashed line


@dataclass(frozen=True)
class Chart:
    """Curves over the same steps (or `across`), in the same unit."""

    title: str
    kind: Kind
    lines: Sequence[Line]
    from_zero: bool = False
    may_log: bool = False  # spikes of many times the usual value are expected
    across: Across | None = None


@dataclass(frozen=True)
class Marks:
    """Steps at which something happened: where the run resumed, saved, met a NaN."""

    resumes: Sequence[int] = ()
    checkpoints: Sequence[int] = ()
    not_finite: Sequence[int] = ()


@dataclass
class Drawn:
    """The SVG and, for the page's script, each curve's points in the SVG's coordinates."""

    title: str
    svg: str
    logarithmic: bool
    across: str
    lines: list[dict[str, Any]] = field(default_factory=list)


def draw(chart: Chart, steps: tuple[int, int], marks: Marks) -> Drawn:
    """Draw `chart` over steps first..last. At least one of its lines must hold a point."""
    x = step_axis(*steps) if chart.across is None else _across_axis(chart, chart.across)
    y = _value_axis(chart)
    name = "step" if chart.across is None else chart.across.name
    parts = [
        _grid(x, y, f"{name} (log)" if x.log else name),
        _marks(x, marks),
        _limits(x, chart.across),
    ]
    drawn = Drawn(chart.title, "", y.log, name)
    for line in chart.lines:
        if not len(line.points):
            continue
        placed = [(*_place(x, y, p), p) for p in downsample(line.points).tolist()]
        parts.append(_curve(line, [(px, py) for px, py, _ in placed]))
        points = [
            [px, py, _where(chart, p[0]), value_text(p[1], chart.kind)] for px, py, p in placed
        ]
        drawn.lines.append({"label": line.label, "style": line.style, "points": points})
    drawn.svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_summary(chart))}">'
        f"{''.join(parts)}</svg>"
    )
    return drawn


def _across_axis(chart: Chart, across: Across) -> Axis:
    values = np.concatenate([line.points[:, 0] for line in chart.lines])
    low, high = float(values.min()), max(float(values.max()), *across.limits, -np.inf)
    if across.may_log and low > 0 and high > LOG_FROM * low:
        return log_axis(low, high, across.kind)
    return linear_axis(low, high, across.kind, from_zero=across.from_zero)


def _where(chart: Chart, place: float) -> int | str:
    """Where a point lies: a step's number, or the value across as a person reads it."""
    return int(place) if chart.across is None else value_text(place, chart.across.kind)


def _value_axis(chart: Chart) -> Axis:
    values = np.concatenate([line.points[:, 1] for line in chart.lines])
    low, high = float(values.min()), float(values.max())
    if chart.may_log and low > 0 and high > LOG_FROM * low:
        return log_axis(low, high, chart.kind)
    return linear_axis(low, high, chart.kind, from_zero=chart.from_zero)


def _place(x: Axis, y: Axis, point: list[float]) -> tuple[float, float]:
    return _across(x, point[0]), round(HEIGHT - BOTTOM - y.place(point[1]) * _tall(), 1)


def _across(x: Axis, step: float) -> float:
    return round(LEFT + x.place(step) * (WIDTH - LEFT - RIGHT), 1)


def _tall() -> int:
    return HEIGHT - TOP - BOTTOM


def _grid(x: Axis, y: Axis, name: str) -> str:
    base = HEIGHT - BOTTOM
    parts = []
    for value, label in y.ticks:
        at = round(base - y.place(value) * _tall(), 1)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{at}">{escape(label)}</text>')
    parts.append(f'<path class="base" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>')
    for value, label in x.ticks:
        at = _across(x, value)
        parts.append(f'<path class="base" d="M{at} {base}v4"/>')
        parts.append(f'<text class="x" x="{at}" y="{base + 18}">{escape(label)}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text class="x name" x="{middle}" y="{HEIGHT - 4}">{escape(name)}</text>')
    return "".join(parts)


def _marks(x: Axis, marks: Marks) -> str:
    base = HEIGHT - BOTTOM
    parts = []
    # A set of places: thousands of checkpoints take no more room than there are pixels.
    for foot in sorted({round(_across(x, s)) for s in marks.checkpoints if x.low <= s <= x.high}):
        parts.append(f'<path class="checkpoint" d="M{foot - 3} {base}h6l-3 -5z"/>')
    for style, steps in (("resume", marks.resumes), ("not-finite", marks.not_finite)):
        for at in sorted({_across(x, s) for s in steps if x.low <= s <= x.high}):
            parts.append(f'<path class="{style}" d="M{at} {TOP}V{base}"/>')
    return "".join(parts)


def _limits(x: Axis, across: Across | None) -> str:
    places = [_across(x, limit) for limit in across.limits] if across is not None else []
    return "".join(f'<path class="limit" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>' for at in places)


def _curve(line: Line, places: list[tuple[float, float]]) -> str:
    parts = []
    if line.joined:
        path = "M" + "L".join(f"{px:g} {py:g}" for px, py in places)
        parts.append(f'<path class="line {escape(line.style)}" d="{path}"/>')
    if len(places) <= DOTS or not line.joined:
        parts += [
            f'<circle class="dot {escape(line.style)}" cx="{px:g}" cy="{py:g}" r="2.5"/>'
            for px, py in places
        ]
    return "".join(parts)


def _summary(chart: Chart) -> str:
    """The chart in words, for a reader who cannot see it."""
    said, name = [], "step" if chart.across is None else chart.across.name
    for line in chart.lines:
        if len(line.points):
            (first, start), (last, end) = line.points[[0, -1]].tolist()
            said.append(
                f"{line.label} {value_text(start, chart.kind)} at {name} {_where(chart, first)}, "
                f"{value_text(end, chart.kind)} at {name} {_where(chart, last)}"
            )
    return f"{chart.title}: {'; '.join(said)}"
