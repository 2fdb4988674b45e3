"""What a run teaches of its machine: how much slower kernels are than the profile says."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.errors import PlanError
from fivefold.plan.calibrate.compare import predict
from fivefold.plan.calibrate.finished import Finished
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.profile import Profile, own_profile, read_profile, write_profile

FACTORS = 0.02, 50.0  # beyond that something else is wrong
HALVINGS = 40
SLOWED = ("products", "attention", "bandwidth")


def slowdown(run: Finished, where: Cluster) -> float:
    """The factor on the time of kernels with which the plan's step takes as long as the run's.

    What the host and the links take stays. Raises PlanError where no factor does that.
    """
    low, high = FACTORS
    if not predicted(run, where, low) <= run.step_seconds <= predicted(run, where, high):
        raise PlanError(
            f"kernels alone do not explain a step of {run.step_seconds:.3g} s, for which the plan has "
            f"{predicted(run, where, 1.0):.3g} s",
            "look at what the host and the links take, and whether the run was on this machine",
        )
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        if predicted(run, where, middle) < run.step_seconds:
            low = middle
        else:
            high = middle
    return high


def predicted(run: Finished, where: Cluster, factor: float) -> float:
    """Seconds of a step where kernels take `factor` times as long."""
    return predict(run, slowed(where, factor)).total


def slowed(where: Cluster, factor: float) -> Cluster:
    """The cluster with kernels that take `factor` times as long."""
    found = where.device.efficiency
    slower = {name: getattr(found, name) / factor for name in SLOWED}
    slower["launch"] = found.launch * factor
    device = replace(where.device, efficiency=replace(found, **slower))
    return replace(where, device=device)


def recalibrated(run: Finished, where: Cluster, factor: float, path: Path) -> str:
    """Write what was learnt to `path` (.json for this machine's profile, else .yaml): its text.

    The file is a cluster that `--cluster` reads. Raises PlanError when it cannot be written.
    """
    profile = _own(run, where)
    note = f"kernels {factor:.3g} times as long as measured alone, by the run {run.name}"
    if profile is not None:
        before = profile.corrections.get("step", 1.0)
        corrections = {**profile.corrections, "step": before * factor}
        write_profile(profile.model_copy(update={"corrections": corrections, "note": note}), path)
        return note
    text = yaml.safe_dump(_as_file(slowed(where, factor), note), sort_keys=False)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}", "choose another --out") from error
    return note


def file_for(run: Finished, where: Cluster, folder: Path) -> Path:
    """Where `recalibrated` writes by default."""
    return folder / ("hardware.json" if _own(run, where) is not None else "hardware.yaml")


def _own(run: Finished, where: Cluster) -> Profile | None:
    """This machine's profile, where the run's device is the one that it is of."""
    kind = "cuda" if "devices_here" in run.hardware else "cpu"
    path = own_profile(kind)
    if not path.exists():
        return None
    profile = read_profile(path)
    return profile if profile.name == where.device.name else None


def _as_file(where: Cluster, note: str) -> dict[str, Any]:
    """A cluster as its YAML file says it."""
    device = where.device
    links = {
        name: {key: value for key, value in asdict(getattr(where, name)).items() if key != "source"}
        for name in ("inside", "between", "host")
    }
    return {
        "name": where.name,
        "nodes": where.nodes,
        "per_node": where.per_node,
        "domain": where.domain,
        "device": {
            "name": device.name,
            "peak": dict(device.peak),
            "memory": device.memory,
            "bandwidth": device.bandwidth,
            "watts": device.watts,
            **({} if device.price is None else {"price": device.price}),
            **({} if device.spot_price is None else {"spot_price": device.spot_price}),
            "efficiency": {**asdict(device.efficiency), "source": note},
            "source": device.source,
        },
        **links,
        "failures": where.failures,
        "restart": where.restart,
    }
