"""The records of a training run: metrics.jsonl, evaluations.jsonl and TensorBoard event files.

One line a step in metrics.jsonl: `step, loss, grad_norm, lr, tokens, tokens_per_second, mfu,
step_seconds, memory_bytes`, and whatever else the engine adds. Units and meanings are in
docs/observe.md. A value that is NaN or infinite is written null and named under `not_finite`.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from fivefold.core.errors import DataError
from fivefold.observe.event_files import EventFiles
from fivefold.observe.json_lines import JsonLines, read_json_lines

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


class MetricsWriter:
    """Appends the records of one run. One writer at a time: the run directory is locked."""

    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        """Open the files in `run_dir`, mending a line that a killed run left torn.

        Raises TrainingError when they cannot be written.
        """
        self._steps = JsonLines(run_dir / METRICS)
        self._evaluations = JsonLines(run_dir / EVALUATIONS)
        self._events = EventFiles(run_dir / "tensorboard") if tensorboard else None

    def truncate_after(self, step: int) -> None:
        """Forget the records of steps after `step`, so that each step appears once."""
        self._steps.truncate_after(step)
        self._evaluations.truncate_after(step)
        if self._events is not None:
            self._events.purge_after(step)

    def write(self, row: dict[str, Any]) -> None:
        """Add the record of one step; `row` holds an integer `step`. On disk when this returns."""
        self._steps.append(row)
        if self._events is not None:
            self._events.add("train", row)

    def write_evaluation(self, step: int, loss: float) -> None:
        """Add the mean loss over held-out data, in nats, of the model after `step`."""
        row = {"step": step, "loss": loss}
        self._evaluations.append(row)
        if self._events is not None:
            self._events.add("evaluate", row)

    def close(self) -> None:
        """Close all files; closing twice is harmless."""
        self._steps.close()
        self._evaluations.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One record a step, in order; a line still being written is left out.

    Raises DataError when `run_dir` holds no metrics.jsonl, or naming a damaged line of it.
    """
    path = run_dir / METRICS
    if not path.exists():
        raise DataError(f"{run_dir} holds no {METRICS}", "give the folder of a training run")
    return read_json_lines(path)


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Held-out losses: `{"step", "loss"}` in order of time; none where no evaluation was made."""
    return read_json_lines(run_dir / EVALUATIONS)
