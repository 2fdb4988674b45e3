"""Where the axes of a layout lie: devices in domains, groups on links."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fivefold.core.layout import Layout
from fivefold.plan.communication import Group, expert_groups, group
from fivefold.plan.search.found import Found

COLOURS = {
    "tp": "#d1605e", "cp": "#c77b9c", "ep": "#e49444", "dp": "#4878a8", "pp": "#6a9f58",
}  # fmt: skip
GROUPS = {
    "tp": ("tp",), "cp": ("cp",), "dp": ("dp_replicate", "dp_shard"), "pp": ("pp",),
}  # fmt: skip
MOST_DOMAINS, MOST_DEVICES, MOST_MEMBERS = 6, 24, 4
CELL, SPACE, TOP = 26, 6, 30


@dataclass(frozen=True)
class Axis:
    """One axis: its ways, the members of rank 0's group, and the link between them."""

    name: str
    ways: int
    members: tuple[int, ...]
    group: Group
    exposed: float
    hidden: float
    rate: float  # bytes per second of the link it is bound to, in one direction


def axes(found: Found) -> list[Axis]:
    """The axes of more than one way, innermost first."""
    layout, cluster = found.strategy.layout, found.job.cluster
    listed = []
    for name, parts in GROUPS.items():
        there = group(cluster, layout, parts)
        if there.ranks > 1:
            members = _members(layout, parts)
            listed.append(_axis(found, name, there.ranks, members, there))
    if layout.ep > 1:
        there = expert_groups(cluster, layout)[0]
        listed.append(_axis(found, "ep", layout.ep, tuple(range(layout.ep)), there))
    return sorted(listed, key=lambda each: each.members[1])


def _axis(found: Found, name: str, ways: int, members: tuple[int, ...], there: Group) -> Axis:
    time = found.time
    cluster = found.job.cluster
    link = cluster.between if there.crosses else cluster.inside
    exposed, hidden = (each.get(name, 0.0) for each in (time.exposed, time.hidden))
    return Axis(name, ways, members, there, exposed, hidden, link.rate)


def _members(layout: Layout, parts: tuple[str, ...]) -> tuple[int, ...]:
    """Ranks that differ from rank 0 in `parts` alone."""
    ranks, stride = [0], 1
    for axis in reversed(layout.order):
        ways = getattr(layout, axis)
        if axis in parts:
            ranks = [rank + stride * k for k in range(ways) for rank in ranks]
        stride *= ways
    return tuple(sorted(ranks))


def place(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's position on each axis."""
    found = {}
    for axis in reversed(layout.order):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return found


def topology(found: Found) -> str:
    """SVG: the domains that rank 0's groups reach first, and each group as a line through them."""
    cluster, layout = found.job.cluster, found.strategy.layout
    listed = axes(found)
    near = [rank for axis in listed for rank in axis.members[:MOST_MEMBERS]]
    domains = sorted({rank // cluster.domain for rank in (0, *near)})[:MOST_DOMAINS]
    shown = min(cluster.domain, MOST_DEVICES)
    columns = min(shown, 8)
    rows = -(-shown // columns)
    wide, tall = columns * (CELL + SPACE) + SPACE, rows * (CELL + SPACE) + SPACE
    across = 2 if columns >= 8 else 3
    gap = 26 + 5 * len(listed)
    parts, places = [], {}
    for index, domain in enumerate(domains):
        x, y = index % across * (wide + 40) + 34, index // across * (tall + TOP + gap) + TOP
        parts.append(_domain(x, y, wide, tall, _name(found, domain)))
        for slot in range(shown):
            rank = domain * cluster.domain + slot
            if rank >= layout.world_size:
                break
            cx = x + SPACE + slot % columns * (CELL + SPACE) + CELL / 2
            cy = y + SPACE + slot // columns * (CELL + SPACE) + CELL / 2
            places[rank] = cx, cy
            parts.append(_device(layout, rank, cx, cy))
    for index, axis in enumerate(listed):
        parts.append(_line(axis, [places[r] for r in axis.members if r in places], index))
    height = -(-len(domains) // across) * (tall + TOP + gap) + 4
    width = min(len(domains), across) * (wide + 40) + 34
    return (
        f'<svg class="topology" viewBox="0 0 {width} {height}" style="max-width:{width * 1.3:.0f}px" '
        f'role="img" aria-label="axes on links">{"".join(parts)}</svg>'
    )


def _name(found: Found, domain: int) -> str:
    cluster = found.job.cluster
    per = max(1, cluster.domain // cluster.per_node)
    nodes = f"node {domain}" if per == 1 else f"nodes {domain * per} to {domain * per + per - 1}"
    left = cluster.domain - MOST_DEVICES
    return nodes + (f" ({left} more devices)" if left > 0 else "")


def _domain(x: float, y: float, wide: float, tall: float, name: str) -> str:
    return (
        f'<rect class="domain" x="{x}" y="{y}" width="{wide}" height="{tall}" rx="6"/>'
        f'<text x="{x}" y="{y - 6}">{escape(name)}</text>'
    )


def _device(layout: Layout, rank: int, x: float, y: float) -> str:
    where = " ".join(
        f"{axis}={at}" for axis, at in place(layout, rank).items() if getattr(layout, axis) > 1
    )
    return (
        f'<g><title>rank {rank}: {escape(where)}</title><rect class="device" '
        f'x="{x - CELL / 2}" y="{y - CELL / 2}" width="{CELL}" height="{CELL}" rx="4"/>'
        f'<text class="rank" x="{x}" y="{y + 3}">{rank}</text></g>'
    )


def _line(axis: Axis, points: list[tuple[float, float]], index: int) -> str:
    """Through the members that are shown, below their middle so that lines do not hide each other."""
    if len(points) < 2:
        return ""
    shift = CELL / 2 + 3 + 4 * index
    colour = COLOURS[axis.name]
    path = _path([(x + 2 * index - 4, y + shift) for x, y in points])
    ticks = "".join(
        f'<path d="M{x + 2 * index - 4:.1f} {y + CELL / 2}v{shift - CELL / 2:.1f}" '
        f'stroke="{colour}"/>'
        for x, y in points
    )
    tip = f"{axis.name}: {axis.ways} ranks over {axis.group.where}"
    return (
        f'<g class="axis-line"><title>{escape(tip)}</title>{ticks}'
        f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"/></g>'
    )


def _path(points: list[tuple[float, float]]) -> str:
    """Straight in a row of domains; from row to row in a bow that leaves what is between readable."""
    (x, y), rest = points[0], points[1:]
    path = f"M{x:.1f} {y:.1f}"
    for nx, ny in rest:
        if ny == y:
            path += f"L{nx:.1f} {ny:.1f}"
        else:
            side = min(x, nx) - 28
            path += f"C{side:.1f} {y:.1f} {side:.1f} {ny:.1f} {nx:.1f} {ny:.1f}"
        x, y = nx, ny
    return path
