"""`fivefold config`: look at recipes and at what a run would use, before it runs."""

from __future__ import annotations

import json

import typer

config_app = typer.Typer(name="config", help="Show recipes and resolved configurations.")


@config_app.command(
    "show",
    epilog="Examples:\n\n"
    "    fivefold config show quickstart\n\n"
    "    fivefold config show my.yaml --layout dp_shard=2 --set optimizer.lr=1e-3 --json",
)
def show(
    source: str = typer.Argument(help="A recipe's name or a YAML file."),
    layout: str | None = typer.Option(None, help="AXIS=N,… overrides of the layout."),
    sets: list[str] = typer.Option([], "--set", help="KEY=VALUE override; may be repeated."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: {key: {value, origin}}."),
) -> None:
    """Print the resolved configuration with where each value came from."""
    from fivefold.core.resolve import flatten, resolve

    resolved = resolve(source, layout=layout, sets=sets)
    leaves = flatten(resolved.config.model_dump(mode="json"))
    if as_json:
        rows = {k: {"value": v, "origin": resolved.origin(k)} for k, v in leaves.items()}
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(f"{k}: {json.dumps(v)}") for k, v in leaves.items() if len(str(v)) < 40)
    for key, value in leaves.items():
        typer.echo(f"{f'{key}: {json.dumps(value)}':<{width}}  # {resolved.origin(key)}")


@config_app.command("list")
def list_recipes() -> None:
    """Print the names of the recipes."""
    from fivefold.core.resolve import recipes

    for name in recipes():
        typer.echo(name)


@config_app.command("keys")
def keys() -> None:
    """Print every configuration key with its default and meaning."""
    from fivefold.core.resolve import describe_keys

    for key, default, meaning in describe_keys():
        typer.echo(f"{key:<28} {default!s:<24} {meaning}")
