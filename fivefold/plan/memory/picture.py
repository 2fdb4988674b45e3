"""Ledgers as an SVG picture that needs nothing else: one stacked bar a pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.observe.format import size as in_units
from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.memory.parts import PARTS, sizes

ROW, GAP, LEFT, TOP, WIDTH, RIGHT = 24, 8, 70, 70, 760, 90
LIMIT = "#b00020"


def memory_svg(ledgers: Sequence[Ledger], title: str, limit: float | None = None) -> str:
    """`limit`: bytes of one device, drawn as a line. A pointer over a box shows what it is."""
    most = max(max(ledger.total for ledger in ledgers), limit or 0) * 1.02
    height = TOP + len(ledgers) * (ROW + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        f'width="{LEFT + WIDTH + RIGHT}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *_legend(),
    ]
    for row, ledger in enumerate(ledgers):
        parts += _bar(ledger, TOP + row * (ROW + GAP), WIDTH / most)
    if limit is not None:
        x = LEFT + limit / most * WIDTH
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 24}" stroke="{LIMIT}" '
            f'stroke-dasharray="4 3"/><text x="{x:.1f}" y="{height - 8}" fill="{LIMIT}" '
            f'text-anchor="middle">device: {in_units(limit)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _bar(ledger: Ledger, y: int, scale: float) -> list[str]:
    found = [f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">rank {ledger.rank}</text>']
    x = float(LEFT)
    for part, size in zip(PARTS, sizes(ledger).values(), strict=True):
        tip = f"rank {ledger.rank}, {part.name}: {in_units(size)} ({part.meaning})"
        found.append(
            f'<rect x="{x:.2f}" y="{y}" width="{size * scale:.2f}" height="{ROW}" '
            f'fill="{part.colour}"><title>{escape(tip)}</title></rect>'
        )
        x += size * scale
    found.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{in_units(ledger.total)}</text>')
    return found


def _legend() -> list[str]:
    found, x = [], LEFT
    for part in PARTS:
        found.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{part.colour}"/>')
        found.append(f'<text x="{x + 16}" y="48">{part.name}</text>')
        x += 34 + 7 * len(part.name)
    return found
