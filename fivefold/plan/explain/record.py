"""An answer as numbers, for JSON."""

from __future__ import annotations

from math import isfinite
from typing import Any

from fivefold.plan.cost import RunCost, run_cost
from fivefold.plan.explain.compare import differences
from fivefold.plan.explain.notes import notes
from fivefold.plan.export.recipe import layout_values
from fivefold.plan.search.answer import Answer
from fivefold.plan.search.found import Found


def record(answer: Answer) -> dict[str, Any]:
    """Everything that is printed, and more; seconds, bytes, dollars."""
    job = answer.job
    return {
        "model": job.shape.name,
        "cluster": {
            "name": job.cluster.name,
            "device": job.cluster.device.name,
            "nodes": job.cluster.nodes,
            "per_node": job.cluster.per_node,
            "domain": job.cluster.domain,
            "devices": job.devices,
            "memory": job.cluster.device.memory,
        },
        "workload": {
            "sequence": job.training.sequence,
            "global_batch": job.training.global_batch,
            "tokens": job.training.tokens,
            "compute": job.training.compute,
            "optimizer": job.training.optimizer,
        },
        "software": job.software.name,
        "objective": answer.objective,
        "best": strategy_record(answer.winner),
        "ranking": [strategy_record(each) for each in answer.ranking],
        "front": [strategy_record(each) for each in answer.front],
        "guess": None if answer.guess is None else strategy_record(answer.guess),
        "guess_refused": None if answer.refused is None else str(answer.refused),
        "guess_place": answer.place,
        "change": None
        if answer.change is None
        else {"words": answer.change.words, **strategy_record(answer.change.found)},
        "runner_up_differs": _differences(answer.winner, answer.runner_up),
        "guess_differs": _differences(answer.winner, answer.guess),
        "notes": notes(answer),
        "error_band": answer.winner.time.error,
        "search": vars(answer.counts),
    }


def strategy_record(found: Found) -> dict[str, Any]:
    """One strategy with all that is known of it."""
    time, strategy = found.time, found.strategy
    return {
        "layout": layout_values(strategy.layout),
        "text": str(strategy.layout),
        "micro_batch": strategy.micro_batch,
        "recompute": strategy.recompute,
        "microbatches": time.microbatches,
        "devices": found.job.devices,
        "fits": found.fits,
        "bytes": found.bytes,
        "room": found.room,
        "step_seconds": time.total,
        "pieces": dict(time.pieces),
        "exposed": dict(time.exposed),
        "hidden": dict(time.hidden),
        "mfu": time.mfu,
        "hfu": time.hfu,
        "flops_per_device": time.flops_per_device,
        "tokens_per_second": time.tokens_per_second,
        "run": None if (cost := bill(found)) is None else cost_record(cost),
        "run_on_spot": None if (cost := bill(found, spot=True)) is None else cost_record(cost),
    }


def bill(found: Found, *, spot: bool = False) -> RunCost | None:
    """What the whole run costs; None without a number of tokens (or a spot price)."""
    job = found.job
    if not job.training.tokens or (spot and job.cluster.device.spot_price is None):
        return None
    return run_cost(found.time, job.training, job.cluster, spot=spot)


def cost_record(cost: RunCost) -> dict[str, Any]:
    """Days, device hours, kWh, dollars; null for what is without end."""
    found = {
        "steps": cost.steps,
        "days": cost.days,
        "device_hours": cost.device_hours,
        "energy_kwh": cost.energy,
        "dollars": cost.dollars,
        "price": cost.price,
        "goodput": cost.goodput.share,
        "checkpoint_every_seconds": cost.goodput.interval,
        "interruptions_a_day": cost.goodput.interruptions_a_day,
    }
    endless = {name for name, value in found.items() if value is not None and not isfinite(value)}
    return {name: None if name in endless else value for name, value in found.items()}


def _differences(first: Found, second: Found | None) -> list[dict[str, Any]]:
    if second is None:
        return []
    return [vars(each) for each in differences(first, second)]
