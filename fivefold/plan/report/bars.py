"""Memory of each pipeline rank as stacked bars, and a step's pieces as a waterfall: SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.observe import format as as_text
from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.memory.parts import PARTS, sizes

WIDTH, LEFT, RIGHT, ROW, GAP = 720, 96, 76, 20, 5
MOST_RANKS = 32

COLOURS = {
    "products": "#4878a8",
    "attention": "#7ba6c9",
    "elementwise": "#9fc2d8",
    "host": "#b5b0a8",
    "recompute": "#e49444",
    "tp exposed": "#d1605e",
    "cp exposed": "#c77b9c",
    "ep exposed": "#b04a7a",
    "pp exposed": "#8f6bb3",
    "dp exposed": "#a85c9f",
    "bubble": "#8a8f98",
    "optimizer": "#6a9f58",
    "data": "#967662",
}


def memory_bars(ledgers: Sequence[Ledger], limit: float) -> str:
    """One bar a pipeline rank (of many the first, the fullest and the last), `limit` a line."""
    shown = _some(ledgers)
    most = max(limit, *(ledger.total for ledger in shown)) * 1.01
    scale = (WIDTH - LEFT - RIGHT) / most
    height = len(shown) * (ROW + GAP) + 30
    parts = []
    for row, ledger in enumerate(shown):
        y = row * (ROW + GAP) + 4
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{y + ROW / 2}">stage {ledger.rank}</text>')
        x = float(LEFT)
        for part, size in zip(PARTS, sizes(ledger).values(), strict=True):
            tip = f"stage {ledger.rank}, {part.name}: {as_text.size(size)} ({part.meaning})"
            parts.append(_box(x, y, size * scale, part.colour, tip))
            x += size * scale
        parts.append(_text(x + 6, y + ROW / 2 + 4, as_text.size(ledger.total)))
    x = LEFT + limit * scale
    parts.append(f'<path class="limit-line" d="M{x:.1f} 0V{height - 22}"/>')
    parts.append(
        f'<text class="x" x="{x:.1f}" y="{height - 6}">device: {as_text.size(limit)}</text>'
    )
    return _svg(height, parts, f"memory of {len(ledgers)} pipeline ranks")


def waterfall(pieces: Sequence[tuple[str, float]], total: float) -> str:
    """Each piece where the one before it ends, and the sum."""
    rows = [*pieces, ("step", total)]
    scale = (WIDTH - LEFT - RIGHT - 40) / total
    parts, at = [], 0.0
    for row, (name, seconds) in enumerate(rows):
        y = row * (ROW + GAP) + 4
        start = 0.0 if name == "step" else at
        colour = COLOURS.get(name, "#5b6472")
        tip = f"{name}: {as_text.latency(seconds)}, {seconds / total:.1%}"
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{y + ROW / 2}">{escape(name)}</text>')
        parts.append(_box(LEFT + start * scale, y, max(1.0, seconds * scale), colour, tip))
        end = LEFT + (start + seconds) * scale
        share = "" if name == "step" else f" ({seconds / total:.1%})"
        parts.append(_text(end + 6, y + ROW / 2 + 4, f"{as_text.latency(seconds)}{share}"))
        at += 0.0 if name == "step" else seconds
    return _svg(len(rows) * (ROW + GAP) + 8, parts, "pieces of a step that add up to it")


def _some(ledgers: Sequence[Ledger]) -> list[Ledger]:
    if len(ledgers) <= MOST_RANKS:
        return list(ledgers)
    fullest = max(ledgers, key=lambda each: each.total)
    kept = {0, len(ledgers) - 1, fullest.rank, *range(MOST_RANKS - 2)}
    return [ledger for ledger in ledgers if ledger.rank in kept]


def _box(x: float, y: float, width: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:g}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
