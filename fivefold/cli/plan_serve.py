"""`fivefold plan serve`: how many devices serve some traffic, in which layout, how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fivefold.plan.serving.report import Report

EXAMPLES = """Examples:

    fivefold plan serve --model llama-3.1-70b --cluster 8xH100 --rate 5 --input-tokens 2000 --output-tokens 300 --slo ttft=500ms,tpot=50ms

    fivefold plan serve --model qwen3-32b --cluster 8xH100 --layout tp=2 --weights fp8 --system vllm --concurrency 32 --explain

    fivefold plan serve --model llama-3.1-8b --cluster 8xH100 --trace azure --trace-file AzureLLMInferenceTrace_conv.csv --slo ttft=1s,tpot=30ms --html serve.html

    fivefold plan serve --model deepseek-v3 --cluster 2xNVL72 --weights nvfp4 --kv fp8 --layout tp=8,ep=8 --concurrency 64 --speculate 0.7x3 --json
"""


def plan_serve(
    model: str = typer.Option(..., help="config.json, a folder with one, or a published name."),
    cluster: str = typer.Option(..., help="8xH100, 4x8xH100, 2xNVL72, a YAML file, or `this`."),
    layout: str | None = typer.Option(
        None, help="Look at this layout of an engine (tp=4,ep=4) instead of searching."
    ),
    split: str | None = typer.Option(
        None, help="With --layout: prefill and decode apart, engines of either, e.g. 2+3."
    ),
    rate: float | None = typer.Option(None, help="Requests a second, Poisson."),
    concurrency: int | None = typer.Option(None, help="So many ask at once, again when answered."),
    input_tokens: int = typer.Option(2000, help="Tokens of a prompt."),
    output_tokens: int = typer.Option(300, help="Tokens of an answer."),
    spread: float = typer.Option(0.0, help="Lengths lie this share around those."),
    shared_prefix: int = typer.Option(0, help="Of a prompt's tokens, those that all share."),
    trace: str | None = typer.Option(None, help="azure or mooncake: --trace-file is of this kind."),
    trace_file: Path | None = typer.Option(None, help="Azure's CSV or Mooncake's JSONL."),
    speed: float = typer.Option(1.0, help="Trace: its times pass so many times as fast."),
    requests: int | None = typer.Option(None, help="Requests that are simulated at most."),
    slo: str | None = typer.Option(None, help="Limits: ttft=500ms,tpot=50ms (also e2e, itl)."),
    share: float = typer.Option(0.95, help="Of requests that must be within all limits."),
    weights: str | None = typer.Option(
        None, help="bf16, fp8, int8, int4, nvfp4, mxfp4, fp32. [default: bf16; fp32 on a CPU]"
    ),
    kv: str | None = typer.Option(None, help="Keys and values: bf16, fp8, ... [default: 16 bits]"),
    system: str | None = typer.Option(
        None, help="Whose engine: fivefold, vllm, sglang, trtllm. [default: that of --flags]"
    ),
    max_sequences: int = typer.Option(256, help="Answers in the making at once, of an engine."),
    token_budget: int | None = typer.Option(None, help="Tokens a step. [default: the system's]"),
    speculate: str | None = typer.Option(
        None, help="Acceptance rate x drafted tokens, e.g. 0.7x4; @0.05 adds a draft's cost."
    ),
    seed: int = typer.Option(0, min=0, help="Of arrivals and lengths."),
    flags: str | None = typer.Option(None, help="Also print such an engine's flags: vllm, sglang."),
    explain: bool = typer.Option(False, "--explain", help="Show the arithmetic."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    html: Path | None = typer.Option(None, help="Write a page with the same and plots here."),
) -> None:
    """Say which engines serve traffic within its limits, or what one layout does with it."""
    from fivefold.plan.hardware.parse import cluster as read_cluster
    from fivefold.plan.models.parse import shape as read_shape
    from fivefold.plan.serving.question import Question
    from fivefold.plan.serving.report import answer

    _check_page(html)
    _check_flags(flags)
    found, on = read_shape(model), read_cluster(cluster)
    question = Question(
        layout=layout, split=split, rate=rate, concurrency=concurrency,
        input_tokens=input_tokens, output_tokens=output_tokens, spread=spread,
        shared_prefix=shared_prefix, trace=trace, trace_file=trace_file, speed=speed,
        requests=requests, slo=slo, share=share, weights=weights, kv=kv,
        system=system or flags or "fivefold",
        max_sequences=max_sequences, token_budget=token_budget, speculate=speculate, seed=seed,
    )  # fmt: skip
    report = answer(found, on, question)
    if html is not None:
        _write_page(html, report)
    if as_json:
        typer.echo(json.dumps(report.record()))
        return
    _print(report, explain)
    if flags is not None:
        _print_flags(flags, model, report)


plan_serve.__doc__ = f"{plan_serve.__doc__}\n\n{EXAMPLES}"


def _print(report: Report, explained: bool) -> None:
    from rich.console import Console

    from fivefold.plan.serving.table import print_report

    print_report(report, Console(highlight=False), explained)


def _write_page(path: Path, report: Any) -> None:
    from fivefold.core.errors import PlanError
    from fivefold.plan.serving.page import page

    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"cannot write {path}: {error.strerror}", "give a file in a folder that exists"
        ) from error


def _check_page(path: Path | None) -> None:
    from fivefold.core.errors import PlanError

    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise PlanError(f"cannot write --html {path}", "give a file in a folder that exists")


def _check_flags(system: str | None) -> None:
    from fivefold.core.errors import PlanError, nearest

    if system not in (None, "vllm", "sglang"):
        raise PlanError(f"--flags: unknown system {system!r}", nearest(system, ("vllm", "sglang")))


def _print_flags(system: str, model: str, report: Report) -> None:
    from fivefold.plan.export.sglang import sglang
    from fivefold.plan.export.vllm import vllm

    found = (vllm if system == "vllm" else sglang)(model, report.engine)
    typer.echo(f"\n{found.command}")
    for note in found.notes:
        typer.echo(f"# {note}")
