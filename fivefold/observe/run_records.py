"""Everything a run directory says about its run, whatever of it is there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.resolve import flatten
from fivefold.observe.json_lines import NOT_FINITE
from fivefold.observe.metrics import read_evaluations, read_metrics
from fivefold.observe.series import Curve, curve


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, read once."""

    name: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    samples: list[dict[str, str]]  # step, prompt, text
    config: dict[str, Any]  # dotted key to value

    def curve(self, key: str) -> Curve:
        """(step, value) of the steps that recorded a finite number under `key`."""
        return curve(self.metrics, key)

    @property
    def held_out(self) -> Curve:
        """(step, loss) of the evaluations; of one made twice, the later."""
        return curve({row["step"]: row for row in self.evaluations}.values(), "loss")

    @property
    def steps_wanted(self) -> int | None:
        """`train.steps` of the configuration."""
        wanted = self.config.get("train.steps")
        return wanted if isinstance(wanted, int) else None

    @property
    def resumes(self) -> list[int]:
        """Steps after which the run was taken up again."""
        return [e["step"] for e in self.events if e["event"] == "resume" and _has_step(e)]

    @property
    def checkpoints(self) -> list[int]:
        """Steps after which state was saved."""
        return sorted(
            {e["step"] for e in self.events if e["event"] == "checkpoint" and _has_step(e)}
        )

    @property
    def not_finite(self) -> list[int]:
        """Steps with a NaN or infinite value."""
        return [row["step"] for row in self.metrics if row.get(NOT_FINITE)]

    @property
    def hardware(self) -> dict[str, Any]:
        """What the last start said of its machine; empty where it said nothing."""
        said = [e["hardware"] for e in self.events if isinstance(e.get("hardware"), dict)]
        return said[-1] if said else {}


def read_run(run_dir: Path) -> RunRecords:
    """Read a run directory. Only metrics.jsonl must be there and sound (DataError if not)."""
    return RunRecords(
        name=run_dir.resolve().name,
        metrics=[row for row in read_metrics(run_dir) if _has_step(row)],
        evaluations=[row for row in read_evaluations(run_dir) if _has_step(row)],
        events=[e for e in _lenient(run_dir / "events.jsonl") if isinstance(e.get("event"), str)],
        samples=[_sample(record) for record in _lenient(run_dir / "samples.jsonl")],
        config=_config(run_dir / "config.yaml"),
    )


def _has_step(row: dict[str, Any]) -> bool:
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def _lenient(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that others append to: a line that a kill tore is passed over."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _sample(record: dict[str, Any]) -> dict[str, str]:
    return {key: str(record.get(key) or "") for key in ("step", "prompt", "text")}


def _config(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text("utf-8", "replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return flatten(values) if isinstance(values, dict) else {}
