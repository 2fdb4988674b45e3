"""`fivefold plan hardware` and `fivefold plan models`: what is known by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fivefold.plan.hardware.cluster import Cluster
    from fivefold.plan.shape import ModelShape

HARDWARE_EPILOG = (
    "Examples:\n\n"
    "    fivefold plan hardware\n\n"
    "    fivefold plan hardware 8x8xH100\n\n"
    "    fivefold plan hardware H100-80GB:3g.40gb --json"
)
MODELS_EPILOG = (
    "Examples:\n\n"
    "    fivefold plan models\n\n"
    "    fivefold plan models deepseek-v3\n\n"
    "    fivefold plan models config.json --json"
)


def plan_hardware(
    cluster: str | None = typer.Argument(None, help="A cluster or device to tell all about."),
    as_json: bool = typer.Option(False, "--json", help="Print every figure in base units as JSON."),
) -> None:
    """The catalogue of devices, or everything about one cluster, with sources."""
    from rich.console import Console

    from fivefold.plan.hardware.catalogue import DEVICES
    from fivefold.plan.hardware.parse import cluster as find

    if cluster is None:
        if as_json:
            typer.echo(json.dumps({name: asdict(found) for name, found in DEVICES.items()}))
        else:
            Console(highlight=False).print(_devices())
        return
    found = find(cluster)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    console = Console(highlight=False)
    for what, told in _about(found):
        console.print(f"[bold]{what}[/bold]  {told}", soft_wrap=True)


def plan_models(
    model: str | None = typer.Argument(None, help="A model to tell all about."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """The catalogue of published models, or one model's parameters by component."""
    from rich.console import Console

    from fivefold.plan.models import shape
    from fivefold.plan.models.parse import names, published

    shapes = [published(name) for name in names()] if model is None else [shape(model)]
    if as_json:
        told = [_numbers(each) for each in shapes]
        typer.echo(json.dumps(told if model is None else told[0]))
        return
    console = Console(highlight=False)
    if model is None:
        console.print(_models(shapes))
        return
    for what, text in _numbers(shapes[0]).items():
        if isinstance(text, dict):
            text = ", ".join(f"{name} {count:,}" for name, count in text.items() if count)
        elif isinstance(text, list):
            text = "; ".join(text)
        elif isinstance(text, int) and not isinstance(text, bool):
            text = f"{text:,}"
        console.print(f"[bold]{what}[/bold]  {text}", soft_wrap=True)


def _devices() -> Table:
    from rich.table import Table

    from fivefold.plan.hardware.catalogue import DEVICES
    from fivefold.plan.hardware.servers import SERVERS

    table = Table(
        box=None,
        header_style="bold",
        caption="dense TFLOP/s in 16 bits and FP8; GB/s one way inside a domain, and beyond it for a "
        "device; prices of one place at one time. Sources: fivefold plan hardware NAME",
    )
    table.add_column("device", no_wrap=True)
    for name in ("16 bit", "fp8", "GiB", "TB/s", "W", "domain", "GB/s", "beyond", "$/h", "spot"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in DEVICES.items():
        server = SERVERS[name]
        half = found.peak.get("bf16", found.peak["fp16"])
        table.add_row(
            name, f"{half / 1e12:,.0f}",
            f"{found.peak['fp8'] / 1e12:,.0f}" if "fp8" in found.peak else "",
            f"{found.memory / 2**30:.1f}", f"{found.bandwidth / 1e12:.2f}", f"{found.watts:,.0f}",
            str(server.domain), f"{server.inside.bandwidth / 1e9:,.0f}",
            f"{server.between.bandwidth / 1e9:,.1f}",
            "" if found.price is None else f"{found.price:.2f}",
            "" if found.spot_price is None else f"{found.spot_price:.2f}",
        )  # fmt: skip
    return table


def _about(found: Cluster) -> list[tuple[str, str]]:
    """(what, text) with where each figure is from."""
    device = found.device
    lines = [
        ("cluster", f"{found.name}: {found.nodes} x {found.per_node}, domains of {found.domain}"),
        ("device", f"{device.name} ({device.source})"),
        ("peak", ", ".join(f"{form} {rate / 1e12:,.4g} TFLOP/s" for form, rate in device.peak.items())),
        (
            "memory",
            f"{device.memory / 2**30:.2f} GiB at {device.bandwidth / 1e9:,.0f} GB/s"
            + (f" ({device.notes['memory']})" if "memory" in device.notes else ""),
        ),
    ]  # fmt: skip
    reached = ", ".join(
        f"{name} {value:.3g}"
        for name, value in asdict(device.efficiency).items()
        if name != "source"
    )
    lines.append(("reached", f"{reached} ({device.efficiency.source})"))
    if device.price is not None:
        spot = "" if device.spot_price is None else f", spot {device.spot_price:.2f}"
        of = device.notes.get("price", "given")
        lines.append(("price", f"{device.price:.2f} $ an hour{spot} ({of})"))
    for name in ("inside", "between", "host"):
        link = getattr(found, name)
        lines.append(
            (
                name,
                f"{link.name}: {link.bandwidth / 1e9:,.4g} GB/s one way, of which {link.efficiency:.0%}; "
                f"{link.latency * 1e6:.3g} µs a message, {link.start * 1e6:.3g} µs before the first "
                f"({link.source})",
            )
        )
    others = [(k, v) for k, v in device.notes.items() if k not in ("memory", "price")]
    return [*lines, *others]


def _numbers(shape: ModelShape) -> dict[str, Any]:
    from fivefold.plan.models import parameters

    config, counted = shape.config, parameters(shape)
    found: dict[str, Any] = {
        "name": shape.name,
        "parameters": counted.total,
        "active": counted.active,
        "by component": counted.by_component(),
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
    }
    if config.moe is not None:
        found |= {"experts": config.moe.experts, "top_k": config.moe.top_k}
    return found | {"runs here": shape.runs, "notes": list(shape.notes), "source": shape.source}


def _models(shapes: list[ModelShape]) -> Table:
    from rich.table import Table

    from fivefold.plan.models import parameters

    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    for name in (
        "parameters",
        "active",
        "layers",
        "hidden",
        "heads",
        "kv",
        "vocabulary",
        "experts",
    ):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in shapes:
        config, counted = each.config, parameters(each)
        moe = config.moe
        sparse = "" if counted.active == counted.total else f"{counted.active / 1e9:,.2f} B"
        table.add_row(
            each.name, f"{counted.total / 1e9:,.2f} B", sparse, str(config.num_layers),
            f"{config.hidden_size:,}", str(config.num_heads),
            "latent" if config.mla else str(config.num_kv_heads), f"{config.vocab_size:,}",
            "" if moe is None else f"{moe.top_k} of {moe.experts}",
            "" if each.runs else "to plan only",
        )  # fmt: skip
    return table
