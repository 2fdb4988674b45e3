"""Accounts as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from fivefold.engines.train.dry_run.account import Account, Memory

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MEANING = {
    "parameters": "what forward computes with",
    "masters": "besides the parameters",
    "gradients": "when all are reduced",
    "optimizer": "moments",
    "activations": "most of all else at one time",
    "peak": "most of all at one time",
}


def show(title: str, accounts: Sequence[Account], console: Console) -> None:
    """Print each rank's memory and collectives."""
    console.print(title, soft_wrap=True)
    for account in accounts:
        place = " ".join(f"{axis}={index}" for axis, index in account.coordinates.items())
        console.print(f"\nrank {account.rank} ({place})", soft_wrap=True)
        console.print(_memory(account))
        if account.collectives:
            console.print(_collectives(account))


def size(count: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {UNITS[unit]}"


def _memory(account: Account) -> Table:
    table = Table("memory", "bytes", "size", "", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for field in fields(Memory):
        held = getattr(account.memory, field.name)
        table.add_row(field.name, f"{held:,}", size(held), MEANING[field.name])
    return table


def _collectives(account: Account) -> Table:
    table = Table("collective", "axis", "ranks", "count", "bytes", "sent")
    for column in table.columns[2:]:
        column.justify = "right"
    for c in account.collectives:
        table.add_row(c.kind, c.axis, f"{c.ranks:,}", f"{c.count:,}", size(c.bytes), size(c.sent))
    return table
