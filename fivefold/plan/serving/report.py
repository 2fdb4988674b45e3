"""The answer to a question about serving, as data: what tables, pages and JSON show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.advise import Option, ServingPlan, plan_serving
from fivefold.plan.serving.batch import Batch, StepCost
from fivefold.plan.serving.capacity import Room, room
from fivefold.plan.serving.curve import Point, curve
from fivefold.plan.serving.explain import explain
from fivefold.plan.serving.question import Question
from fivefold.plan.serving.simulate import Simulation, simulate
from fivefold.plan.serving.step import model
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.this import as_measured
from fivefold.plan.serving.traffic import Traffic
from fivefold.plan.shape import ModelShape

BAND = {"ttft": 0.40, "tpot": 0.19}
"""Mean absolute error of predictions against published measurements (docs/plan-serving.md)."""


@dataclass(frozen=True)
class Report:
    """`engine` is the one that is looked at closely: given, or the search's first."""

    shape: ModelShape
    cluster: Cluster
    question: Question
    engine: ServingStrategy
    room: Room
    points: tuple[Point, ...]
    batch: int
    cost: StepCost
    lines: tuple[str, ...]
    simulation: Simulation | None
    plan: ServingPlan | None

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        question = {k: v for k, v in asdict(self.question).items() if v is not None}
        if "trace_file" in question:
            question["trace_file"] = str(question["trace_file"])
        return {
            "model": self.shape.name,
            "cluster": self.cluster.name,
            "question": question,
            "layout": str(self.engine.layout),
            "devices_an_engine": self.engine.engine_ranks,
            "room": asdict(self.room),
            "step": {"batch": self.batch, **asdict(self.cost), "total": self.cost.total},
            "curve": [asdict(each) for each in self.points],
            "simulation": None if self.simulation is None else self._simulated(self.simulation),
            "options": [] if self.plan is None else [self._option(o) for o in self.plan.options],
            "bounds": None if self.plan is None else asdict(self.plan.bounds),
            "band": BAND,
            "explain": list(self.lines),
        }

    def _simulated(self, run: Simulation) -> dict[str, Any]:
        return {
            "devices": run.devices,
            "busy": run.busy,
            "preemptions": run.preemptions,
            "prefix_hit_rate": run.hit_rate,
            "summary": run.summary(self.question.limits).record(),
        }

    def _option(self, option: Option) -> dict[str, Any]:
        return {
            "name": option.name,
            "kind": "split" if isinstance(option.deployed, Split) else "together",
            "devices": option.devices,
            "fits": option.fits,
            "share_within_limits": option.share,
            "most_requests_per_second": option.most,
            "dollars_per_million_tokens": option.dollars(self.cluster),
            **self._simulated(option.simulation),
        }


def answer(shape: ModelShape, cluster: Cluster, question: Question) -> Report:
    """Search, or look at the layout that was given. Raises PlanError for what cannot work."""
    traffic, cluster = question.traffic, as_measured(cluster)
    plan, simulation = None, None
    _check_context(shape, question, traffic)
    if question.layout is None and traffic is not None and traffic.users is None:
        like = question.strategy(cluster)
        plan = plan_serving(
            shape, cluster, traffic, question.limits, like, share=question.share
        )  # fmt: skip
        deployed, simulation = plan.best.deployed, plan.best.simulation
    else:
        deployed = question.deployed(cluster)
        _check_devices(deployed, cluster)
        if traffic is not None:
            simulation = simulate(shape, deployed, cluster, traffic)
    engine = deployed.decode if isinstance(deployed, Split) else deployed
    engine = replace(engine, layout=engine.layout.model_copy(update={"dp_replicate": 1}))
    prompt, output = question.input_tokens, question.output_tokens
    if traffic is not None:
        prompt, output = round(traffic.input_tokens), round(traffic.output_tokens)
    points = tuple(curve(shape, engine, cluster, prompt, output))
    batch = _batch(simulation, points)
    context = prompt + output / 2
    step = Batch(rows=batch, context=batch * context, sampled=batch)
    return Report(
        shape, cluster, question, engine, room(shape, engine, cluster), points, batch,
        model(shape, engine, cluster).cost(step),
        tuple(explain(shape, engine, cluster, batch, prompt, output)),
        simulation, plan,
    )  # fmt: skip


def _check_context(shape: ModelShape, question: Question, traffic: Traffic | None) -> None:
    """Raise PlanError for requests that the model was not made for."""
    longest = question.input_tokens + question.output_tokens if traffic is None else traffic.longest
    if longest > shape.config.max_positions:
        raise PlanError(
            f"the longest request has {longest:,} tokens with its answer, but {shape.name} is made"
            f" for {shape.config.max_positions:,}",
            "cut the requests, or take a model of a longer context",
        )


def _batch(run: Simulation | None, points: tuple[Point, ...]) -> int:
    """Answers at once that a step is shown for: as many as the load has, on average."""
    if run is None:
        return points[len(points) // 2].batch
    alive = sum(each.ended - (each.first or each.ended) for each in run.outcomes)
    engines = max(1, len(run.busy))
    return max(1, min(points[-1].batch, round(alive / max(run.seconds, 1e-9) / engines)))


def _check_devices(deployed: ServingStrategy | Split, cluster: Cluster) -> None:
    needed = deployed.devices if isinstance(deployed, Split) else (
        deployed.engine_ranks * deployed.layout.dp_replicate
    )  # fmt: skip
    if needed > cluster.devices:
        raise PlanError(
            f"the layout needs {needed} devices, but {cluster.name} has {cluster.devices}",
            "split less, or take a larger cluster",
        )
