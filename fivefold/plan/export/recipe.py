"""A strategy as a recipe: `fivefold train FILE` runs it."""

from __future__ import annotations

import math
from typing import Any

import yaml

from fivefold import __version__
from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.core.resolve import build
from fivefold.model.families import export_config
from fivefold.plan.search.found import Found

DTYPES = {"fp8": "bf16", "mxfp8": "bf16"}
FEWEST_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def recipe(found: Found) -> str:
    """YAML that `RunConfig` accepts. Raises PlanError for a model that fivefold does not have."""
    values = _values(found)
    build(values)
    return f"{_head(found)}\n{yaml.safe_dump(values, sort_keys=False, width=100)}"


def _values(found: Found) -> dict[str, Any]:
    job, strategy = found.job, found.strategy
    shape, training = job.shape, job.training
    if not (shape.runs and shape.gated) or shape.norm_bias or shape.learned_positions:
        raise PlanError(
            f"there is no recipe for {shape.name}: fivefold's decoder does not have its blocks",
            "use --flags megatron, or a model of a family in docs/models.md",
        )
    train: dict[str, Any] = {}
    if training.tokens is not None:
        step = training.global_batch * training.sequence
        train["steps"] = max(1, math.ceil(training.tokens / step))
    train |= {
        "global_batch": training.global_batch,
        "micro_batch": strategy.micro_batch,
        "recompute": strategy.recompute,
    }
    return {
        "model": {"config": _model(found)},
        "layout": layout_values(strategy.layout),
        "precision": {"dtype": DTYPES.get(training.compute, training.compute)},
        "train": train,
        "data": {"sequence_length": training.sequence},
    }


def _model(found: Found) -> dict[str, Any]:
    exported = export_config(found.job.shape.config)
    return {
        key: _plain(value)
        for key, value in exported.items()
        if value is not None and key not in ("architectures", "transformers_version")
    }


def _plain(value: Any) -> Any:
    """Tuples and other sequences as lists, which YAML has."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def layout_values(layout: Layout) -> dict[str, Any]:
    """What a layout sets, without its defaults; `zero` where state is divided."""
    values = layout.model_dump(exclude_defaults=True)
    values.pop("zero", None)
    if layout.shards > 1:
        values["zero"] = layout.zero
    return {key: _plain(value) for key, value in values.items()}


def _head(found: Found) -> str:
    job = found.job
    lines = [
        f"Planned by fivefold {__version__}: {job.shape.name} on {job.cluster.name}.",
        f"Predicted: {found.seconds:.3g} s a step, {found.bytes / 2**30:.1f} GiB on the fullest "
        f"of {job.devices} devices.",
        "The learning rate, its schedule, data and checkpoints are yours to choose.",
    ]
    if job.training.compute in DTYPES:
        lines.append(f"Products in {job.training.compute} were planned; training has bf16.")
    return "\n".join(f"# {line}" for line in lines)
