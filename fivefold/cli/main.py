"""`fivefold COMMAND`: one-line errors on stderr, exit status 0 only on success."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import NoReturn

import typer

from fivefold import __version__
from fivefold.cli.bench import bench_app
from fivefold.cli.config import config_app
from fivefold.cli.convert import convert
from fivefold.cli.generate import generate
from fivefold.cli.plan import plan_app
from fivefold.cli.quickstart import quickstart
from fivefold.cli.report import report
from fivefold.cli.serve import serve, serve_key
from fivefold.cli.train import train
from fivefold.core.environment import read_ranks, under_torchrun
from fivefold.core.errors import FivefoldError

app = typer.Typer(
    name="fivefold",
    help="One model definition, planned, trained, aligned, compressed and served.",
    epilog="`fivefold COMMAND --help` shows examples. `--debug` anywhere shows tracebacks.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quickstart)
app.command()(train)
app.command()(generate)
app.command()(serve)
app.command()(serve_key)
app.command()(convert)
app.command()(report)
app.add_typer(config_app)
app.add_typer(plan_app)
app.add_typer(bench_app)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Entry of every command."""


def _report(error: FivefoldError) -> None:
    """One line on stderr; of several ranks rank 0 prints, the others leave it for their agent."""
    if under_torchrun():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if read_ranks().is_main:
        print(f"fivefold: {error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line. User errors become one line; bugs keep their traceback."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    try:
        app(args=[a for a in given if a != "--debug"])
    except FivefoldError as error:
        if debug:
            traceback.print_exc()
        _report(error)
        sys.exit(1)
    except KeyboardInterrupt:
        print("fivefold: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe left, e.g. `| head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if debug or error.errno != errno.ENOSPC:
            raise
        print("fivefold: no space is left for the output; free some, or write elsewhere",
              file=sys.stderr)  # fmt: skip
        sys.exit(1)
    sys.exit(0)
