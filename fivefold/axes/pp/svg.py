"""A timeline as an SVG picture that needs nothing else."""

from __future__ import annotations

from html import escape

from fivefold.axes.pp.action import MEANING, Kind
from fivefold.axes.pp.draw import letter
from fivefold.axes.pp.timeline import Span, Timeline

COLOUR: dict[Kind, str] = {"F": "#8fb8de", "B": "#a5d6a7", "I": "#80cbc4", "W": "#d9b3e6"}
IDLE, MESSAGE = "#ececec", "#c62828"
ROW, GAP, LEFT, TOP = 26, 6, 64, 40
NARROWEST, WIDEST = 900.0, 4000.0  # of the drawing, in pixels
CELL = 22.0  # pixels that a short action would like to have


def svg(timeline: Timeline, title: str) -> str:
    """The ranks as rows; each action a box with its micro-batch, messages as lines between rows.

    Darker boxes are later stages of a rank. A pointer over a box shows what it is and when.
    """
    short = max(timeline.short_action, timeline.makespan / WIDEST)
    width = min(WIDEST, max(NARROWEST, CELL * timeline.makespan / short))
    scale = width / timeline.makespan
    ranks = timeline.schedule.ranks
    height = TOP + ranks * (ROW + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + width + 10:.0f}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for rank in range(ranks):
        y = _y(rank)
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{IDLE}"/>')
    parts += [_box(timeline, span, scale) for span in timeline.spans]
    parts += _messages(timeline, scale)
    parts.append(_legend(timeline, height - 12))
    return "\n".join([*parts, "</svg>\n"])


def _y(rank: int) -> int:
    return TOP + rank * (ROW + GAP)


def _box(timeline: Timeline, span: Span, scale: float) -> str:
    action = span.action
    held = timeline.schedule.held(span.rank)
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    shade = 0.22 * held.index(action.stage) / max(1, len(held) - 1)
    tip = f"{action.in_words}, {span.start:.6g} to {span.end:.6g}"
    box = f'x="{x:.2f}" y="{_y(span.rank)}" width="{width:.2f}" height="{ROW}"'
    found = [f"<g><title>{escape(tip)}</title>"]
    found.append(f'<rect {box} fill="{COLOUR[action.kind]}" stroke="white"/>')
    if shade:
        found.append(f'<rect {box} fill="black" opacity="{shade:.2f}"/>')
    text = f"{action.microbatch}{letter(timeline, action.stage)}"
    if width > 7 * len(text):
        centre, y = x + width / 2, _y(span.rank) + 17
        found.append(f'<text x="{centre:.2f}" y="{y}" text-anchor="middle">{text}</text>')
    return "".join([*found, "</g>"])


def _messages(timeline: Timeline, scale: float) -> list[str]:
    found = []
    for message in timeline.messages:
        if message.end > message.start:
            downward = message.target > message.source
            ends = (
                _y(message.source) + (ROW if downward else 0),
                _y(message.target) + (0 if downward else ROW),
            )
            found.append(
                f'<line x1="{LEFT + message.start * scale:.2f}" y1="{ends[0]}" '
                f'x2="{LEFT + message.end * scale:.2f}" y2="{ends[1]}" stroke="{MESSAGE}"/>'
            )
    return found


def _legend(timeline: Timeline, y: int) -> str:
    names = [
        (COLOUR[kind], MEANING[kind])
        for kind in MEANING
        if any(span.action.kind == kind for span in timeline.spans)
    ]
    names.append((IDLE, "idle"))
    if any(m.end > m.start for m in timeline.messages):
        names.append((MESSAGE, "communication"))
    parts, x = [], LEFT
    for colour, name in names:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{name}</text>')
        x += 40 + 7 * len(name)
    return "".join(parts)
