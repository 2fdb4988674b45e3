"""A training workload from a few words: `seq=4096,batch=512,tokens=1T`."""

from __future__ import annotations

import re
from typing import Any

from fivefold.core.errors import PlanError, nearest
from fivefold.plan.workload import Training

COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbBgGtT]?)")
TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
FORMATS = ("bf16", "fp16", "fp32", "fp8", "mxfp8")
OPTIMIZERS = ("adamw", "sgd")
KEYS = {
    "seq": "sequence",
    "sequence": "sequence",
    "batch": "global_batch",
    "global_batch": "global_batch",
    "batch_tokens": "batch_tokens",
    "tokens": "tokens",
    "precision": "compute",
    "optimizer": "optimizer",
}
TRAFFIC = ("rate", "requests", "ttft", "tpot", "input", "output", "trace", "concurrency")
MOST_SEQUENCES = 1_000_000
EXAMPLE = "write e.g. seq=4096,batch=512,tokens=1T,precision=bf16"


def training(text: str) -> Training:
    """Read a workload: `batch` in sequences, or `batch_tokens`; `tokens` in all.

    Raises PlanError that names what is unknown, missing, or no number.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, separator, value = (each.strip() for each in part.partition("="))
        if name in TRAFFIC:
            raise PlanError(
                f"workload {part!r} is of requests to answer", "use `fivefold plan serve`"
            )
        if not separator or not value:
            raise PlanError(f"workload part {part!r} is not KEY=VALUE", EXAMPLE)
        if name not in KEYS:
            raise PlanError(f"unknown workload key {name!r}", nearest(name, KEYS))
        if KEYS[name] in values:
            raise PlanError(f"workload says {name!r} twice", "say it once")
        values[KEYS[name]] = _value(KEYS[name], value)
    return _checked(values)


def _value(name: str, value: str) -> Any:
    if name in ("compute", "optimizer"):
        known = FORMATS if name == "compute" else OPTIMIZERS
        if value.lower() not in known:
            raise PlanError(f"unknown {name} {value!r}", nearest(value.lower(), known))
        return value.lower()
    number = amount(value)
    if number is None or number <= 0:
        raise PlanError(f"workload {name}={value!r} is no number above 0", "write e.g. 4096 or 1T")
    if name == "tokens":
        return number
    if number != int(number):
        raise PlanError(f"workload {name}={value!r} is no whole number", "write e.g. 4096")
    return int(number)


def amount(text: str) -> float | None:
    """`512`, `16M`, `1.5T`: decimal, `8k` is 8,000."""
    match = COUNT.fullmatch(text.strip())
    return None if match is None else float(match[1]) * TIMES[match[2].lower()]


def _checked(values: dict[str, Any]) -> Training:
    if "sequence" not in values:
        raise PlanError("the workload does not say `seq`, tokens of a sequence", EXAMPLE)
    size = values.pop("batch_tokens", None)
    if size is not None and "global_batch" in values:
        raise PlanError("the workload says `batch` and `batch_tokens`", "say one of them")
    if size is not None:
        if size % values["sequence"]:
            whole = max(1, round(size / values["sequence"]))
            raise PlanError(
                f"batch_tokens={size:,} is no multiple of sequences of {values['sequence']}",
                f"use batch={whole}",
            )
        values["global_batch"] = size // values["sequence"]
    if "global_batch" not in values:
        raise PlanError("the workload does not say `batch`, sequences of a step", EXAMPLE)
    if values["global_batch"] > MOST_SEQUENCES:
        raise PlanError(
            f"a batch of {values['global_batch']:,} sequences is more than a plan takes",
            f"use at most {MOST_SEQUENCES:,}",
        )
    return Training(**values)
