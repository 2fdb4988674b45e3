"""`fivefold plan --model … --cluster … --workload …`: the best layouts of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fivefold.core.errors import PlanError, nearest

if TYPE_CHECKING:
    from fivefold.plan.export.flags import Flags
    from fivefold.plan.search.answer import Answer

TRAINERS = ("megatron", "torchtitan")
SERVERS = ("vllm", "sglang")


def plan_training(
    *,
    model: str | None,
    cluster: str | None,
    workload: str | None,
    layout: str | None,
    objective: str,
    software: str,
    flags: str | None,
    recipe: Path | None,
    html: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Read what is asked, search, and write what is wanted. Raises a FivefoldError."""
    _check(model, cluster, workload, flags)
    for path in (recipe, html):
        _check_file(path)
    found = _answer(str(model), str(cluster), str(workload), layout, objective, software)
    text = _flags(found, flags)
    if recipe is not None:
        from fivefold.plan.export.recipe import recipe as as_recipe

        _write(recipe, as_recipe(found.winner))
    if html is not None:
        from fivefold.plan.report.page import page

        _write(html, page(found))
    if as_json:
        typer.echo(json.dumps(_record(found, text)))
        return
    _print(found, explain, text)
    for path in (recipe, html):
        if path is not None:
            typer.echo(f"wrote {path}")


def _check(model: str | None, cluster: str | None, workload: str | None, flags: str | None) -> None:
    examples = {
        "model": "llama-3.1-70b", "cluster": "8x8xH100", "workload": "seq=4096,batch=512",
    }  # fmt: skip
    for name, value in (("model", model), ("cluster", cluster), ("workload", workload)):
        if value is None:
            raise PlanError(f"--{name} is missing", f"give e.g. --{name} {examples[name]}")
    if flags in SERVERS:
        raise PlanError(f"{flags} serves and does not train", "use `fivefold plan serve`")
    if flags is not None and flags not in TRAINERS:
        raise PlanError(f"unknown system {flags!r} for --flags", nearest(flags, TRAINERS))


def _answer(
    model: str, cluster: str, workload: str, layout: str | None, objective: str, software: str
) -> Answer:
    from fivefold.plan.hardware.catalogue import DEVICES
    from fivefold.plan.hardware.parse import cluster as read_cluster
    from fivefold.plan.models.parse import shape
    from fivefold.plan.search.answer import Asked, answer, check_objective
    from fivefold.plan.search.estimators import estimators
    from fivefold.plan.search.guess import parse_guess
    from fivefold.plan.search.job import Job
    from fivefold.plan.software import software as system
    from fivefold.plan.training_text import training

    job = Job(shape(model), training(workload), read_cluster(cluster), system(software))
    job.cluster.device.flops("fp8" if job.training.compute == "mxfp8" else job.training.compute)
    guess = None if layout is None else parse_guess(layout)
    asked = Asked(guess, check_objective(objective), others=tuple(DEVICES.values()))
    return answer(job, estimators(), asked)


def _flags(found: Answer, system: str | None) -> Flags | None:
    if system is None:
        return None
    from fivefold.plan.export.megatron import megatron
    from fivefold.plan.export.torchtitan import torchtitan

    return (megatron if system == "megatron" else torchtitan)(found.winner)


def _record(found: Answer, text: Flags | None) -> dict[str, Any]:
    from fivefold.plan.explain.record import record

    shown = record(found)
    if text is not None:
        shown["flags"] = {
            "system": text.system, "start": text.start, "words": text.words, "notes": text.notes,
        }  # fmt: skip
    return shown


def _print(found: Answer, explain: bool, text: Flags | None) -> None:
    from rich.console import Console

    from fivefold.plan.explain.table import print_answer

    print_answer(found, Console(highlight=False), explain)
    if text is None:
        return
    typer.echo(f"\n{text.system}:\n{text.command}")
    for note in text.notes:
        typer.echo(f"# {note}")


def _check_file(path: Path | None) -> None:
    """Before a search that would be for nothing."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise PlanError(f"cannot write {path}", "give a file in a folder that exists")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}", "choose another file") from None
