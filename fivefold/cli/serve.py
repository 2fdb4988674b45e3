"""`fivefold serve`: OpenAI's HTTP API over a model on this machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Literal

import typer

EXAMPLES = """Examples:

    fivefold serve

    fivefold serve --model path/to/folder --host 0.0.0.0 --port 8080 --api-keys keys.yaml

    fivefold serve --max-sequences 16 --kv-memory 512M --max-context 2048

    fivefold serve --layout dp_replicate=2 --threads 2

    fivefold serve --model path/to/folder --layout tp=2,pp=2

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "prompt": "The capital of France is"}'
"""


def serve(
    model: str = typer.Option(
        "smollm2", help="Hugging Face folder, GGUF file, llama2.c file, run, checkpoint, `smollm2`."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0: all."),
    port: int = typer.Option(8000, min=0, max=65535, help="0: a free one."),
    served_name: list[str] = typer.Option(
        [], help="What clients call the model; may be repeated. Default: the model's."
    ),
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = typer.Option(
        "auto", help="auto: bf16 where the device multiplies it natively, else fp32."
    ),
    device: str = typer.Option("auto", help="auto: a GPU where there is one; or e.g. cpu, cuda:1."),
    threads: int | None = typer.Option(
        None,
        min=1,
        help="CPU threads of each engine; default: torch's, or an equal share of the CPUs.",
    ),
    deterministic: bool = typer.Option(
        False, help="Kernels whose bits for a token are those of training, in any batch."
    ),
    layout: str = typer.Option(
        "", help="tp, pp, ep: ranks of an engine; dp_replicate=N: N engines behind one address."
    ),
    max_sequences: int = typer.Option(64, min=1, help="Answers written at once by an engine."),
    token_budget: int = typer.Option(512, min=1, help="Tokens a step computes."),
    queue_limit: int = typer.Option(1024, min=1, help="Requests that may wait; more get 429."),
    kv_memory: str | None = typer.Option(
        None, help="For keys and values, e.g. 512M or 4G; default: measured."
    ),
    max_context: int | None = typer.Option(
        None, min=1, help="Prompt and answer together; default: the model's."
    ),
    prefix_cache: bool = typer.Option(True, help="Equal beginnings are computed once."),
    api_keys: Path | None = typer.Option(
        None, help="YAML file of keys, as `fivefold serve-key` prints them; default: open to all."
    ),
    max_body: str = typer.Option("8M", help="Largest body of a request."),
    request_seconds: float = typer.Option(600.0, min=0.1, help="A request's time."),
    drain_seconds: float = typer.Option(
        30.0, min=0, help="After SIGTERM or Ctrl-C: time for requests that run."
    ),
    engine_seconds: float = typer.Option(
        300.0,
        min=1,
        help="An engine that says nothing for so long while requests wait is replaced.",
    ),
    tool_parser: str = typer.Option(
        "auto", help="How the model writes tool calls: hermes, llama3_json, none; auto: guessed."
    ),
    reasoning_parser: str = typer.Option(
        "auto", help="How it marks its reasoning: think, think_opened, none; auto: guessed."
    ),
    access_log: bool = typer.Option(False, help="A line on stdout for each request."),
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    from fivefold.engines.serve.server.messages import EngineOptions
    from fivefold.engines.serve.server.service import Limits
    from fivefold.engines.serve.server.serving import ServerOptions, run

    logging.basicConfig(format="fivefold: %(message)s", stream=sys.stderr)
    settings = {
        "max_sequences": max_sequences,
        "token_budget": token_budget,
        "queue_limit": queue_limit,
        "kv_bytes": None if kv_memory is None else as_bytes("--kv-memory", kv_memory),
        "max_context": max_context,
        "prefix_cache": prefix_cache,
    }
    replicas, engine_layout = split_layout(layout)
    run(
        EngineOptions(
            model, dtype, device, deterministic, threads, settings, engine_layout,
            silence_seconds=engine_seconds,
        ),
        ServerOptions(
            host=host, port=port, names=tuple(served_name), keys=api_keys,
            limits=Limits(as_bytes("--max-body", max_body), request_seconds),
            drain_seconds=drain_seconds, tool_parser=tool_parser,
            reasoning_parser=reasoning_parser, replicas=replicas,
            access_log=access_log,
        ),
        lambda line: print(f"fivefold: {line}", flush=True),
    )  # fmt: skip


serve.__doc__ = f"{serve.__doc__}\n\n{EXAMPLES}"


def serve_key(
    name: str = typer.Argument(..., help="Whose key it is."),
    tenant: str | None = typer.Option(
        None, help="Keys of one tenant share cached prefixes; default: the name."
    ),
    requests_per_minute: int | None = typer.Option(None, min=1, help="Default: no limit."),
    tokens_per_minute: int | None = typer.Option(
        None, min=1, help="Of prompts and answers. Default: no limit."
    ),
) -> None:
    """Make an API key: the key on stderr, its entry for the file of `--api-keys` on stdout.

    Examples:

        echo "keys:" > keys.yaml

        fivefold serve-key alice --tokens-per-minute 100000 >> keys.yaml
    """
    import yaml

    from fivefold.engines.serve.server.keys import new_key

    key, digest = new_key()
    entry = {
        "name": name, "sha256": digest, "tenant": tenant,
        "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
    }  # fmt: skip
    print(f"the key, which is kept nowhere: {key}", file=sys.stderr)
    given = {what: value for what, value in entry.items() if value is not None}
    typer.echo(yaml.safe_dump([given], sort_keys=False), nl=False)


def as_bytes(option: str, text: str) -> int:
    """`512M` and the like. Raises ConfigError."""
    from fivefold.core.errors import ConfigError

    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = units.get(number[-1:], 1)
    digits = number.rstrip("KMG")
    try:
        size = int(float(digits) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{option} {text} is no size", "write e.g. 512M or 4G")
    return size


def split_layout(text: str) -> tuple[int, str]:
    """Engines behind the server, and the layout of each.

    Raises LayoutError for axes that serving does not have.
    """
    from fivefold.core.layout import Layout
    from fivefold.engines.serve.parallel.layout import engine_layout, read_layout

    layout = read_layout(text)
    engine_layout(layout)
    one = layout.model_copy(update={"dp_replicate": 1})
    return layout.dp_replicate, "" if one == Layout() else str(one)
