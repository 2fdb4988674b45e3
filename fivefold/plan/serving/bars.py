"""Two pictures in SVG: what fills a device's memory, and what a step's time goes to."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, ROW, LEFT, RIGHT = 600, 26, 130, 70
COLOURS = ("#3b6fb6", "#b65f3b", "#4d9a6a", "#8a63a8", "#c2a038", "#5b8f99", "#a0506e", "#777777")


def stack(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of (name, size, text), its parts beside each other, and a line for each part."""
    total = sum(size for _, size, _ in parts) or 1.0
    height = 40 + 20 * len(parts)
    place, drawn = 0.0, []
    for number, (name, size, text) in enumerate(parts):
        wide = size / total * WIDTH
        colour, y = COLOURS[number % len(COLOURS)], 48 + 20 * number
        drawn.append(
            f'<rect x="{place:.1f}" y="0" width="{wide:.1f}" height="28" fill="{colour}"/>'
            f'<rect x="0" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="20" y="{y}">{escape(name)}</text>'
            f'<text x="{WIDTH}" y="{y}" text-anchor="end">{escape(text)}</text>'
        )
        place += wide
    return _svg(title, height, drawn)


def waterfall(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Parts of (name, size, text) one below the other, each beginning where the last ended."""
    total = sum(size for _, size, _ in parts) or 1.0
    wide, place, drawn = WIDTH - LEFT - RIGHT, 0.0, []
    for number, (name, size, text) in enumerate(parts):
        y, x = number * ROW, LEFT + place / total * wide
        length = max(1.0, size / total * wide)
        drawn.append(
            f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}"'
            f' fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text x="{x + length + 5:.1f}" y="{y + 17}">{escape(text)}</text>'
        )
        place += size
    return _svg(title, ROW * len(parts) + 4, drawn)


def _svg(title: str, height: float, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"'
        f' class="bars">{"".join(drawn)}</svg>'
    )
