"""`fivefold bench device`: what this machine reaches, kept as the profile that plans use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fivefold.plan.hardware.profile import Profile

EXAMPLES = (
    "Examples:\n\n"
    "    fivefold bench device\n\n"
    "    fivefold bench device --seconds 0.5 --dtype fp32 --dtype bf16 --out box.json\n\n"
    "    fivefold plan --model smollm2 --cluster this --workload seq=512,batch=8,precision=fp32\n\n"
)


def device(
    kind: str = typer.Option("cpu", "--device", help="cpu or cuda."),
    dtype: list[str] = typer.Option([], help="fp32, bf16 or fp16; may be repeated."),
    ranks: list[int] = typer.Option(
        [],
        help="Processes of a group for collectives; may be repeated. 1: none. [default: 2, 4, …]",
    ),
    seconds: float = typer.Option(0.15, min=0.001, help="Time for each measurement."),
    out: Path | None = typer.Option(
        None, help="Write the profile to this file instead of the user's cache (cluster `this`)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the profile as JSON."),
) -> None:
    """Measure products by shape and format, attention, memory and collectives of this machine."""
    from rich.console import Console

    from fivefold.plan.calibrate.measure import measure_device
    from fivefold.plan.hardware.profile import own_profile, write_profile

    errors = Console(stderr=True)
    profile = measure_device(
        kind, dtype or None, ranks or None, seconds,
        lambda what: errors.print(f"measuring {what} …", style="dim"),
    )  # fmt: skip
    path = own_profile(profile.device_type) if out is None else out
    write_profile(profile, path)
    if as_json:
        typer.echo(json.dumps(profile.model_dump(mode="json")))
        return
    console = Console(highlight=False)
    for table in (_products(profile), _others(profile)):
        console.print(table)
    if profile.disturbed:
        console.print(
            "other processes ran meanwhile: measure again when it is quiet", style="yellow"
        )
    name = f"this:{profile.device_type}" if out is None else str(out)
    console.print(f"written to {path}: plan with --cluster {name}", soft_wrap=True)


def _products(profile: Profile) -> Table:
    """Rates of products: a row a format, kind and matrix, a column a number of rows."""
    from rich.table import Table

    rows = sorted({each.m for each in profile.gemm})
    table = Table(box=None, header_style="bold", title=f"{profile.name}: GFLOP/s by rows")
    for name in ("dtype", "kind", "matrix"):
        table.add_column(name, no_wrap=True)
    for m in rows:
        table.add_column(str(m), justify="right", no_wrap=True)
    rates = {(g.dtype, g.kind, g.k, g.n, g.m): g.rate for g in profile.gemm}
    for key in dict.fromkeys(key[:4] for key in rates):
        dtype, kind, k, n = key
        told = [f"{rates[*key, m] / 1e9:,.1f}" if (*key, m) in rates else "" for m in rows]
        table.add_row(dtype, kind, f"{k} x {n}", *told)
    return table


def _others(profile: Profile) -> Table:
    """Attention, memory, the smallest operator, and collectives."""
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("what", "of"):
        table.add_column(name)
    for name in ("time", "rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for a in profile.attention:
        of = f"{a.dtype} {a.batch} x {a.sequence}, {a.heads}/{a.kv_heads} heads of {a.head_dim}"
        table.add_row(f"attention {a.kind}", of, _time(a.seconds), f"{a.rate / 1e9:,.1f} GFLOP/s")
    for t in profile.transfers:
        rate = f"{t.bytes / t.seconds / 1e9:,.1f} GB/s"
        table.add_row(t.what, f"{t.bytes / 2**20:g} MiB", _time(t.seconds), rate)
    table.add_row("smallest operator", "one number", _time(profile.launch), "")
    for c in profile.collectives:
        of = f"{c.backend}, {c.ranks} ranks, {c.bytes / 1024:g} KiB"
        table.add_row(c.op, of, _time(c.seconds), f"{c.bytes / c.seconds / 1e9:,.2f} GB/s")
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
