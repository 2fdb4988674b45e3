"""`fivefold bench`: what this machine reaches, against what it could."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import typer

from fivefold.cli.bench_device import EXAMPLES, device
from fivefold.cli.bench_serve import serve

if TYPE_CHECKING:
    from fivefold.kernels.cases import Case
    from fivefold.observe.peak import Bandwidth, Peak

bench_app = typer.Typer(
    name="bench",
    help="Measure this machine against its limits, or a server under load.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Measured:
    """One operator: what computed it and why, how long it took, and the least it could take.

    of_bound: share of the bound reached. against_torch: torch's time over ours.
    """

    op: str
    what: str
    dtype: str
    implementation: str
    why: str
    microseconds: float
    bound: Literal["products", "memory"]
    of_bound: float
    against_torch: float | None
    disturbed: bool


def measure(case: Case, device: str, peak: Peak, bandwidth: Bandwidth, seconds: float) -> Measured:
    """Time a case and torch's own, each for about `seconds`."""
    from fivefold.kernels import dispatch
    from fivefold.observe.peak import UNDISTURBED
    from fivefold.observe.timing import best_timing

    ours = best_timing(case.run, device, seconds)
    theirs = best_timing(case.peer, device, seconds) if case.peer is not None else None
    arithmetic = case.flops / peak.flops_per_second
    memory = case.nbytes / bandwidth.bytes_per_second
    choice = dispatch.choose(case.op, device, case.dtype)
    return Measured(
        op=case.op,
        what=case.what,
        dtype=str(case.dtype).removeprefix("torch."),
        implementation=choice.implementation,
        why=choice.why,
        microseconds=ours.seconds * 1e6,
        bound="products" if arithmetic > memory else "memory",
        of_bound=max(arithmetic, memory) / ours.seconds,
        against_torch=None if theirs is None else theirs.seconds / ours.seconds,
        disturbed=device == "cpu" and ours.cores < UNDISTURBED,
    )


@bench_app.callback()
def _bench() -> None:
    """Measure this machine against its limits, or a server under load."""


bench_app.command("serve")(serve)
bench_app.command("device", epilog=EXAMPLES)(device)


@bench_app.command(
    "kernels",
    epilog="Examples:\n\n"
    "    fivefold bench kernels\n\n"
    "    fivefold bench kernels --dtype bf16 --op linear --op flash_attention\n\n"
    "    fivefold bench kernels --deterministic --json",
)
def kernels(
    dtype: str = typer.Option("fp32", help="fp32, bf16 or fp16."),
    op: list[str] = typer.Option([], help="Only this operator; may be repeated."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    seconds: float = typer.Option(0.3, min=0.001, help="Time for each operator and its peer."),
    batch: int = typer.Option(4, min=1, help="Rows of tokens."),
    length: int = typer.Option(512, min=1, help="Tokens of a row."),
    peer: bool = typer.Option(True, help="Time torch's own operators beside ours."),
    deterministic: bool = typer.Option(False, help="The policy of training and serving alike."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per operator."),
) -> None:
    """Which implementation of each operator is chosen here, why, and how near its bound it runs."""
    found = _measure_all(dtype, op, device, seconds, batch, length, peer, deterministic, as_json)
    if not as_json:
        _print_table(found)


def _measure_all(
    dtype: str,
    ops: list[str],
    device: str,
    seconds: float,
    batch: int,
    length: int,
    peer: bool,
    deterministic: bool,
    as_json: bool,
) -> list[Measured]:
    from dataclasses import replace

    import torch

    from fivefold.core.errors import ConfigError, nearest
    from fivefold.kernels import dispatch
    from fivefold.kernels.cases import OPERATORS, Sizes, cases
    from fivefold.observe.peak import FORMATS, measured_bandwidth, measured_peak

    if dtype not in FORMATS:
        raise ConfigError(f"no kernels for number format {dtype!r}", nearest(dtype, FORMATS))
    for name in ops:
        if name not in OPERATORS:
            raise ConfigError(f"there is no operator {name!r}", nearest(name, OPERATORS))
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise ConfigError(f"no device {device!r} here", "try --device cpu")
    peak, bandwidth = measured_peak(device, dtype), measured_bandwidth(device)
    sizes, found = Sizes(batch=batch, length=length), []
    with dispatch.deterministic(deterministic):
        for case in cases(sizes, FORMATS[dtype], device, ops or OPERATORS):
            case = case if peer else replace(case, peer=None)
            found.append(measure(case, device, peak, bandwidth, seconds))
            if as_json:
                typer.echo(json.dumps(asdict(found[-1])))
    return found


def _print_table(found: list[Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("operator", no_wrap=True)
    table.add_column("operands", overflow="fold")
    table.add_column("by", no_wrap=True)
    for name in ("time", "bound", "reached", "torch/ours"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        ratio = "" if row.against_torch is None else f"{row.against_torch:.2f}x"
        table.add_row(
            row.op, row.what, row.implementation, _time(row.microseconds), row.bound,
            f"{row.of_bound:.0%}", ratio,
        )  # fmt: skip
    console = Console()
    console.print(table)
    for op, why in dict.fromkeys((row.op, f"{row.implementation}: {row.why}") for row in found):
        console.print(f"{op}: {why}", style="dim")
    if any(row.disturbed for row in found):
        console.print("other processes ran meanwhile: times are too long", style="yellow")


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.0f} µs"
