"""`fivefold plan memory`: what each rank of a layout holds, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fivefold.core.errors import FivefoldError, PlanError, nearest

if TYPE_CHECKING:
    from fivefold.plan.shape import ModelShape
    from fivefold.plan.workload import Strategy, Training

EPILOG = (
    "Examples:\n\n"
    "    fivefold plan memory --model llama-3.1-70b --layout tp=8,pp=4,dp_shard=2 "
    "--sequence 4096 --batch 512 --device H100\n\n"
    "    fivefold plan memory --model 13B --layout tp=4,pp=2,dp_replicate=4 --micro-batch 4 "
    "--batch 512 --recompute full --svg memory.svg\n\n"
    "    fivefold plan memory --model llama-2-7b --explain --context 4096 --sequences 16 --kv fp16\n\n"
    "    fivefold plan memory --model config.json --layout dp_shard=8 --json"
)


def plan_memory(
    model: str = typer.Option(..., help="config.json, a folder, a published name, or 13B."),
    layout: str = typer.Option("", help="AXIS=N,…; empty: one rank."),
    sequence: int = typer.Option(4096, help="Tokens of a sequence."),
    batch: int | None = typer.Option(
        None, help="Sequences of a step. [default: 4 micro-batches a stage]", show_default=False
    ),
    micro_batch: int = typer.Option(1, "--micro-batch", help="Sequences of one forward pass."),
    recompute: str = typer.Option("none", help="none, selective or full."),
    compute: str = typer.Option("bf16", help="Format of products: bf16, fp16, fp32, fp8, mxfp8."),
    optimizer: str = typer.Option("adamw", help="adamw or sgd."),
    software: str = typer.Option(
        "fivefold", help="The training system: fivefold, megatron-core, megatron-2022, …"
    ),
    device: str | None = typer.Option(None, help="A device whose memory is the limit, e.g. H100."),
    explain: bool = typer.Option(False, "--explain", help="Print the arithmetic."),
    context: int = typer.Option(0, help="With --explain: tokens of a sequence in a cache."),
    sequences: int = typer.Option(1, help="With --explain: sequences in the cache."),
    kv: str = typer.Option("bf16", help="With --explain: format of the cache."),
    svg: Path | None = typer.Option(None, help="Write the stacked picture to this file, too."),
    as_json: bool = typer.Option(False, "--json", help="Print every number in bytes as JSON."),
) -> None:
    """What each pipeline rank holds at its fullest: state, activations by component, buffers."""
    from rich.console import Console

    from fivefold.plan.memory.explain import explain_layers
    from fivefold.plan.memory.ledger import ledger
    from fivefold.plan.memory.parts import as_dict
    from fivefold.plan.memory.picture import memory_svg
    from fivefold.plan.memory.show import show
    from fivefold.plan.models.parse import shape as find
    from fivefold.plan.software import software as find_software

    shape = find(model)
    system = find_software(software)
    training, strategy = _what(
        shape, layout, sequence, batch, micro_batch, recompute, compute, optimizer
    )
    ledgers = ledger(shape, training, strategy, system)
    limit = None if device is None else _memory(device)
    title = f"{shape.name}, {strategy.layout}: {sequence:,} tokens, recompute {recompute}"
    if svg is not None:
        _write(svg, memory_svg(ledgers, title, limit))
    if as_json:
        found = {"title": title, "limit": limit, "ranks": [as_dict(one) for one in ledgers]}
        typer.echo(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(title, soft_wrap=True, markup=False)
    show(ledgers, console, limit)
    if limit is not None:
        console.print(_verdict(max(one.total for one in ledgers), limit), soft_wrap=True)
    if explain:
        layers = explain_layers(shape, training, strategy, system)
        typer.echo("\n" + _explained(shape, limit, layers, context, sequences, kv))


def _what(
    shape: ModelShape,
    layout: str,
    sequence: int,
    batch: int | None,
    micro_batch: int,
    recompute: str,
    compute: str,
    optimizer: str,
) -> tuple[Training, Strategy]:
    """The words as what the ledger takes. Raises a FivefoldError for those it does not know."""
    from fivefold.axes.check import check_microbatches, check_model
    from fivefold.core.layout import Layout
    from fivefold.plan.workload import Strategy, Training

    for name, given, known in (
        ("recompute", recompute, ("none", "selective", "full")),
        ("compute", compute, ("bf16", "fp16", "fp32", "fp8", "mxfp8")),
        ("optimizer", optimizer, ("adamw", "sgd")),
    ):
        if given not in known:
            raise PlanError(f"--{name} {given!r} is not known", nearest(given, known))
    for name, number in (("sequence", sequence), ("micro-batch", micro_batch)):
        if number < 1:
            raise PlanError(f"--{name} {number} is none", "give 1 or more")
    found = Layout.parse(layout)
    check_model(found, shape.config, sequence)
    batch = batch or micro_batch * found.dp * 4 * found.pp
    if batch % (micro_batch * found.dp):
        raise PlanError(
            f"a batch of {batch} sequences does not divide into micro-batches of {micro_batch} on "
            f"{found.dp} data ranks",
            f"use a multiple of {micro_batch * found.dp}",
        )
    strategy = Strategy(found, micro_batch, recompute)  # type: ignore[arg-type]
    training = Training(sequence, batch, compute=compute, optimizer=optimizer)  # type: ignore[arg-type]
    check_microbatches(found, strategy.microbatches(training))
    return training, strategy


def _memory(device: str) -> float:
    from fivefold.plan.hardware.catalogue import device as find

    return find(device).memory


def _verdict(total: int, limit: float) -> str:
    from fivefold.observe.format import size

    if total > limit:
        return f"does not fit by {size(total - limit)} a device"
    return f"fits: {size(limit - total)} of {size(limit)} left ({1 - total / limit:.0%})"


def _explained(
    shape: ModelShape,
    limit: float | None,
    layers: list[str],
    context: int,
    sequences: int,
    kv: str,
) -> str:
    from fivefold.plan.memory import explain

    groups = [explain.explain_parameters(shape), explain.explain_state(shape, limit), layers]
    if context:
        groups.append(explain.explain_cache(shape, context, sequences, kv))
    return explain.lines(*groups)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror}", "choose a file in a folder that exists"
        ) from error
