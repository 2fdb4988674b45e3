"""One JSON object a request, as it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.run import Run
from fivefold.observe.json_lines import encode_record


def save_results(path: Path, runs: Sequence[Run]) -> None:
    """Write what became of every request of every run. Raises LoadError."""
    try:
        with path.open("wb") as file:
            for run in runs:
                for outcome in run.outcomes:
                    record = {"load": run.load.name, **outcome.record()}
                    file.write(encode_record(record) + b"\n")
    except OSError as error:
        raise LoadError(
            f"cannot write {path}: {error.strerror}", "choose another --save-results"
        ) from None
