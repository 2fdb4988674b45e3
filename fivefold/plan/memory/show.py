"""Ledgers in a terminal: a table, a stacked picture, and the fullest rank by component."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fivefold.observe.format import size as in_units
from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.memory.parts import PARTS, sizes


def show(ledgers: Sequence[Ledger], console: Console, limit: float | None = None) -> None:
    """Print all; `limit`: bytes of one device, where one is known."""
    console.print(_table(ledgers))
    fullest = max(ledgers, key=lambda ledger: ledger.total)
    for line in bars(ledgers, max(40, min(console.width, 120) - 22), limit):
        console.print(line, soft_wrap=True, markup=False)
    console.print("  ".join(f"{part.letter} {part.name}" for part in PARTS), soft_wrap=True)
    console.print(f"\nrank {fullest.rank} is fullest in: {fullest.moment}", soft_wrap=True)
    console.print(_components(fullest))


def bars(ledgers: Sequence[Ledger], width: int, limit: float | None = None) -> list[str]:
    """A line a rank, letters in proportion; `|` stands where a device ends."""
    most = max(max(ledger.total for ledger in ledgers), limit or 0)
    found = []
    for ledger in ledgers:
        bar, end = "", 0.0
        for part, size in zip(PARTS, sizes(ledger).values(), strict=True):
            end += size / most * width
            bar += part.letter * (round(end) - len(bar))
        bar = bar.ljust(width)
        if limit is not None:
            at = min(width, round(limit / most * width))
            bar = bar[:at] + "|" + bar[at:]
        found.append(f"rank {ledger.rank:<3} {bar} {in_units(ledger.total)}".rstrip())
    return found


def _table(ledgers: Sequence[Ledger]) -> Table:
    table = Table(
        "rank",
        *(part.name for part in PARTS),
        "total",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        column.justify, column.overflow = "right", "fold"
    host = any(ledger.host for ledger in ledgers)
    if host:
        table.add_column("on the host", justify="right")
    for ledger in ledgers:
        cells = [in_units(size) if size else "0" for size in sizes(ledger).values()]
        row = [str(ledger.rank), *cells, in_units(ledger.total)]
        table.add_row(*row, *([in_units(ledger.host)] if host else []))
    return table


def _components(ledger: Ledger) -> Table:
    table = Table("component", "bytes", "size", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, held in (("", ledger.activations), (" (buffer)", ledger.buffers)):
        for name, size in sorted(held.items(), key=lambda item: -item[1]):
            share = size / max(1, ledger.working)
            table.add_row(f"{name}{kind}", f"{size:,}", in_units(size), f"{share:.1%}")
    return table
