"""`fivefold bench serve`: load on a server, and what its users get."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from fivefold.engines.serve.load.session import Session

EXAMPLES = """Examples:

    fivefold bench serve --url http://127.0.0.1:8000 --concurrency 16

    fivefold bench serve --url http://127.0.0.1:8000 --rate 1 --rate 2 --rate 4 --slo ttft=500ms,tpot=50ms --html load.html

    fivefold bench serve --url http://127.0.0.1:8000 --endpoint chat --text book.txt --input-tokens 200

    fivefold bench serve --url http://127.0.0.1:8000 --workload fixed --shared-prefix 512 --input-tokens 544 --output-tokens 32 --concurrency 16

    fivefold bench serve --url http://127.0.0.1:8000 --workload mooncake --trace conversation_trace.jsonl --length-scale 0.05 --duration 120

    fivefold bench serve --url http://127.0.0.1:8000 --workload azure --trace AzureLLMInferenceTrace_conv.csv --speed 2 --requests 500 --json
"""


def serve(
    url: str = typer.Option(..., help="The server: http://HOST:PORT."),
    model: str | None = typer.Option(None, help="Which of its models; default: its first."),
    endpoint: Literal["completions", "chat"] = typer.Option(
        "completions", help="/v1/completions or /v1/chat/completions."
    ),
    workload: str = typer.Option(
        "random", help="random or fixed lengths, an azure or mooncake trace, or texts of a file."
    ),
    input_tokens: int = typer.Option(512, help="Tokens of a prompt."),
    output_tokens: int = typer.Option(128, help="Tokens of an answer."),
    spread: float = typer.Option(0.5, help="random: lengths lie this share around those."),
    shared_prefix: int = typer.Option(0, help="Of a prompt's tokens, those shared with others."),
    prefixes: int = typer.Option(1, help="How many different shared prefixes there are."),
    trace: Path | None = typer.Option(None, help="Azure's CSV or Mooncake's JSONL."),
    prompts: Path | None = typer.Option(
        None, help='file: a prompt a line, or .jsonl: {"prompt": ..., "output_tokens": ...}.'
    ),
    text: Path | None = typer.Option(None, help="Make prompts of runs of this text's words."),
    prompts_as: Literal["ids", "text"] | None = typer.Option(
        None, help="Default: token ids for completions, text for chat."
    ),
    length_scale: float = typer.Option(1.0, help="Trace: multiply all lengths by this."),
    max_prompt_tokens: int | None = typer.Option(None, help="Trace: cut longer prompts."),
    max_output_tokens: int | None = typer.Option(None, help="Trace: cut longer answers."),
    rate: list[float] = typer.Option([], help="Requests a second; each given is a run."),
    arrivals: Literal["poisson", "fixed"] = typer.Option("poisson", help="Of --rate."),
    concurrency: list[int] = typer.Option(
        [], help="So many ask at once, again when answered; each given is a run."
    ),
    speed: float = typer.Option(1.0, help="Trace: its times pass so many times as fast."),
    requests: int | None = typer.Option(
        None, help="Requests of a run; default: 100, the whole trace, or what --duration takes."
    ),
    duration: float | None = typer.Option(None, help="Seconds after which nothing is sent."),
    warmup: int = typer.Option(2, min=0, help="Requests before a run that do not count."),
    slo: str | None = typer.Option(None, help="Limits for goodput: ttft, tpot, itl, e2e."),
    timeout: float = typer.Option(600.0, help="Seconds until a request has failed."),
    seed: int | None = typer.Option(
        None, min=0, help="Same seed, same prompts (which the server may have cached)."
    ),
    vocabulary: int = typer.Option(1000, help="Token ids are drawn below this."),
    ignore_eos: bool = typer.Option(True, help="Have answers as long as asked (no OpenAI field)."),
    temperature: float = typer.Option(0.0, help="Of the requests."),
    extra: str | None = typer.Option(None, help="Further fields of each request, as JSON."),
    api_key: str | None = typer.Option(None, envvar="OPENAI_API_KEY", help="Sent as a bearer."),
    as_json: bool = typer.Option(False, "--json", help="The summaries as one JSON object."),
    html: Path | None = typer.Option(None, help="Write a report with plots here."),
    save_results: Path | None = typer.Option(None, help="Write a JSON line a request here."),
) -> None:
    """Put load on an OpenAI-compatible server and measure what its users get.

    Latencies count from the moment a request was due; the client's own lag is shown beside them.
    """
    from fivefold.engines.serve.load.settings import LoadSettings

    _check_folders({"--html": html, "--save-results": save_results})
    chosen: dict[str, Any] = {} if seed is None else {"seed": seed}
    settings = LoadSettings(
        url=url, model=model, endpoint=endpoint, workload=workload,  # type: ignore[arg-type]
        prompts_as=prompts_as, input_tokens=input_tokens, output_tokens=output_tokens,
        spread=spread, shared_prefix=shared_prefix, prefixes=prefixes, trace=trace,
        prompts=prompts, text=text, length_scale=length_scale,
        max_prompt_tokens=max_prompt_tokens, max_output_tokens=max_output_tokens,
        rates=tuple(rate), arrivals=arrivals, concurrency=tuple(concurrency), speed=speed,
        requests=requests, duration=duration, warmup=warmup, slo=slo, timeout=timeout,
        vocabulary=vocabulary, ignore_eos=ignore_eos, temperature=temperature,
        extra=_fields(extra), api_key=api_key, **chosen,
    )  # fmt: skip
    session = _measured(settings)
    _write(session, html, save_results)
    if as_json:
        record = {"about": session.about, "runs": [s.record() for s in session.summaries]}
        typer.echo(json.dumps(record))
    else:
        _print(session)
    if not any(summary.answered for summary in session.summaries):
        raise typer.Exit(1)


serve.__doc__ = f"{serve.__doc__}\n\n{EXAMPLES}"


def _measured(settings: Any) -> Session:
    from rich.console import Console

    from fivefold.engines.serve.load.progress import LoadProgress
    from fivefold.engines.serve.load.session import bench

    console = Console(stderr=True)
    return bench(settings, lambda name, count: LoadProgress(name, count, console))


def _write(session: Session, html: Path | None, results: Path | None) -> None:
    from fivefold.engines.serve.load.report import write_report
    from fivefold.engines.serve.load.results import save_results

    if results is not None:
        save_results(results, session.runs)
    if html is not None:
        write_report(html, session.runs, session.summaries, session.about)
        print(f"wrote {html}", file=sys.stderr)


def _print(session: Session) -> None:
    from rich.console import Console
    from rich.text import Text

    from fivefold.engines.serve.load.table import print_summaries

    about, console = session.about, Console()
    console.print(Text(f"{about['model']} at {about['address']}: {about['workload']}"))
    console.print(Text(f"prompts: {about['prompts']}, seed {about['seed']}", style="dim"))
    console.print()
    print_summaries(session.summaries, console)


def _fields(text: str | None) -> dict[str, Any]:
    from fivefold.engines.serve.load.errors import LoadError

    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LoadError(f"--extra is no JSON object: {text!r}", """write '{"top_k": 40}'""")
    return found


def _check_folders(paths: dict[str, Path | None]) -> None:
    """Before a run of minutes, not after it."""
    from fivefold.engines.serve.load.errors import LoadError

    for option, path in paths.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise LoadError(f"cannot write {option} {path}", "give a file in a folder that exists")
