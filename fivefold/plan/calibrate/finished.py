"""What a run was and what it measured, in the planner's words."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.axes.pp.record import from_numbers
from fivefold.axes.pp.timeline import Timeline
from fivefold.core.config import RunConfig
from fivefold.core.errors import DataError, PlanError, one_line
from fivefold.core.resolve import build
from fivefold.observe.run_records import RunRecords, read_run
from fivefold.observe.summary import WARM_UP_STEPS
from fivefold.plan.models.parse import shape as find
from fivefold.plan.models.translate import from_config
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import FIVEFOLD
from fivefold.plan.workload import Software, Strategy, Training


@dataclass(frozen=True)
class Finished:
    """A run that has ended, or is long enough under way. Medians leave out the first steps."""

    name: str
    shape: ModelShape
    training: Training
    strategy: Strategy
    software: Software
    steps: int
    step_seconds: float
    spread: float  # of the middle half of all steps, over their median
    tokens_per_second: float
    mfu: float | None  # against the peak that the run measured
    memory: float  # bytes, the most that rank 0 held
    timeline: Timeline | None  # measured, of one step of the pipeline
    hardware: dict[str, Any]


def read_finished(run_dir: Path) -> Finished:
    """Read the records of `fivefold train` in `run_dir`.

    Raises DataError where there are none, PlanError where a plan has no word for what was done.
    """
    records = read_run(run_dir)
    config = _config(run_dir)
    rows = records.metrics
    if not rows:
        raise DataError(f"{run_dir} has no finished step", "let the run take a few steps")
    steady = rows[WARM_UP_STEPS:] if len(rows) > 2 * WARM_UP_STEPS else rows
    seconds = [row["step_seconds"] for row in steady]
    quarter = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    middle = statistics.median(seconds)
    return Finished(
        name=records.name,
        shape=_shape(config, run_dir),
        training=_training(config),
        strategy=Strategy(config.layout, config.train.micro_batch, config.train.recompute),
        software=replace(
            FIVEFOLD,
            chunk=config.train.loss_chunk,
            bucket=int(config.communication.bucket_mib * 2**20),
        ),
        steps=len(rows),
        step_seconds=middle,
        spread=(quarter[2] - quarter[0]) / middle,
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in steady),
        mfu=_median(records, "mfu"),
        memory=max(row.get("memory_bytes") or 0 for row in rows),
        timeline=_timeline(run_dir),
        hardware=records.hardware,
    )


def _config(run_dir: Path) -> RunConfig:
    path = run_dir / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"cannot read {path}: {one_line(error)}", "give the folder of a training run"
        ) from error
    return build(values)


def _shape(config: RunConfig, run_dir: Path) -> ModelShape:
    if config.model.config is not None:
        return from_config(config.model.config, run_dir.resolve().name, str(run_dir))
    assert config.model.source is not None
    return find(config.model.source)


def _training(config: RunConfig) -> Training:
    if config.precision.dtype == "fp64":
        raise PlanError("a plan has no fp64", "compare a run in fp32, bf16 or fp16")
    return Training(
        sequence=config.data.sequence_length,
        global_batch=config.train.global_batch,
        tokens=float(config.train.steps * config.train.global_batch * config.data.sequence_length),
        compute=config.precision.dtype,
    )


def _median(records: RunRecords, key: str) -> float | None:
    values = records.curve(key)[:, 1].tolist()
    steady = values[WARM_UP_STEPS:] if len(values) > 2 * WARM_UP_STEPS else values
    return statistics.median(steady) if steady else None


def _timeline(run_dir: Path) -> Timeline | None:
    path = run_dir / "pipeline.json"
    if not path.exists():
        return None
    try:
        return from_numbers(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {one_line(error)}", "delete it") from error
