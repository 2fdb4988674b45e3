"""Requests through engines with a simulated clock: what their users would have seen.

Discrete events: a request reaches the scheduler of an engine, a step ends. Which tokens a step
computes, who waits, who is put back and what a prefix saves is decided by the scheduler, blocks
and index that serve real requests (`engines/serve/scheduling`); only the time of a step comes from
`StepModel`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from fivefold.engines.serve.load.measures import Summary, summarize
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.run import ClosedLoop, OpenLoop, Run
from fivefold.engines.serve.load.slo import Slo
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.engine import SimulatedEngine
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import Demand, Traffic
from fivefold.plan.serving.transfer import transfer_seconds
from fivefold.plan.shape import ModelShape


@dataclass
class Simulation:
    """What came of it. busy: share of the time that each engine computed."""

    traffic: Traffic
    outcomes: list[Outcome]
    seconds: float
    devices: int
    busy: list[float] = field(default_factory=list)
    preemptions: int = 0
    hit_rate: float = 0.0
    """Prompt tokens found in the prefix cache, as a share of all."""

    def summary(self, slo: Slo | None = None) -> Summary:
        """The same figures as `fivefold bench serve` measures."""
        if self.traffic.users is None:
            times = [each.scheduled for each in self.outcomes]
            return summarize(Run(OpenLoop(times, self.traffic.name), self.outcomes), slo or {})
        return summarize(Run(ClosedLoop(self.traffic.users), self.outcomes), slo or {})


@dataclass
class _Stage:
    """Engines of one kind. `prompts`: those that only read prompts."""

    engines: list[SimulatedEngine]
    prompts: bool = False
    stepping: set[int] = field(default_factory=set)
    polled: dict[int, int] = field(default_factory=dict)


class Simulator:
    """One run. Build it, then `run` once."""

    def __init__(
        self, shape: ModelShape, deployed: ServingStrategy | Split, cluster: Cluster,
        traffic: Traffic, *, prefix_cache: bool | None = None,
    ) -> None:  # fmt: skip
        self._traffic = traffic
        self._shape, self._cluster, self._deployed = shape, cluster, deployed
        cached = traffic.shares if prefix_cache is None else prefix_cache
        self._stages = self._build(cached)
        self._system = (
            deployed.prefill.system if isinstance(deployed, Split) else deployed.system
        )  # fmt: skip
        self._outcomes: list[Outcome] = []
        self._demands: list[Demand] = []
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._tie = count()
        self._next = iter(traffic.demands)
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in self._stages]
        self._texts: dict[tuple[str, int], int] = {}

    def run(self) -> Simulation:
        """Until all are answered."""
        users = self._traffic.users
        if users is None:
            for demand in self._next:
                self._ask(demand, demand.at)
        else:
            for _, demand in zip(range(users), self._next, strict=False):
                self._ask(demand, 0.0)
        now = 0.0
        while self._events:
            now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(now, *what)
        engines = [engine for stage in self._stages for engine in stage.engines]
        asked = sum(engine.prefix.tokens_asked for engine in self._stages[0].engines)
        hit = sum(engine.prefix.tokens_hit for engine in self._stages[0].engines)
        return Simulation(
            self._traffic,
            self._outcomes,
            now,
            _devices(self._deployed),
            [engine.busy / max(now, 1e-9) for engine in engines],
            sum(engine.scheduler.preemptions for engine in engines),
            hit / asked if asked else 0.0,
        )

    def _build(self, cached: bool) -> list[_Stage]:
        shape, cluster, deployed = self._shape, self._cluster, self._deployed
        if isinstance(deployed, Split):
            first = [
                SimulatedEngine(shape, deployed.prefill, cluster, prefix_cache=cached)
                for _ in range(deployed.prefill_engines)
            ]
            second = [
                SimulatedEngine(shape, deployed.decode, cluster, receives=True)
                for _ in range(deployed.decode_engines)
            ]
            return [_Stage(first, prompts=True), _Stage(second)]
        copies = deployed.layout.dp_replicate
        return [
            _Stage(
                [
                    SimulatedEngine(shape, deployed, cluster, prefix_cache=cached)
                    for _ in range(copies)
                ]
            )
        ]

    def _ask(self, demand: Demand, at: float) -> None:
        index = len(self._outcomes)
        outcome = Outcome(index, at, at, at, demand.input, demand.output)
        outcome.prompt_tokens, outcome.counted_by = demand.input, "usage"
        self._outcomes.append(outcome)
        self._demands.append(demand)
        self._push(at + self._system.front, "arrive", index, 0)

    def _push(self, at: float, kind: str, *what: int) -> None:
        heapq.heappush(self._events, (at, next(self._tie), kind, what))

    def _on_arrive(self, now: float, index: int, stage: int) -> None:
        found = self._stages[stage]
        place = min(range(len(found.engines)), key=lambda each: (self._load(stage, each), each))
        self._waiting[stage].append((place, index))
        if place not in found.stepping:
            self._begin(now, stage, place, look=True)

    def _load(self, stage: int, place: int) -> int:
        coming = sum(where == place for where, _ in self._waiting[stage])
        return self._stages[stage].engines[place].load + coming

    def _begin(self, now: float, stage: int, place: int, look: bool = False) -> None:
        """Start a step, if there is anything to do."""
        found = self._stages[stage]
        engine = found.engines[place]
        since = found.polled.get(place, 0) + 1
        due = since >= engine.strategy.system.poll or engine.read_prompts
        if look or due or not engine.has_work:
            since = 0
            self._take(stage, place)
        found.polled[place] = since
        if not engine.has_work:
            found.stepping.discard(place)
            return
        found.stepping.add(place)
        self._push(now + engine.begin(now), "step", stage, place)

    def _take(self, stage: int, place: int) -> None:
        """Hand over what has come for an engine."""
        left = []
        for where, index in self._waiting[stage]:
            if where != place:
                left.append((where, index))
                continue
            self._add(stage, place, index)
        self._waiting[stage] = left

    def _add(self, stage: int, place: int, index: int) -> None:
        engine, demand = self._stages[stage].engines[place], self._demands[index]
        tokens = self._tokens(demand, index)
        if self._stages[stage].prompts:
            engine.add(index, tokens, 1)
        elif stage:
            engine.add(index, [*tokens, 0], demand.output - 1, received=len(tokens))
        else:
            engine.add(index, tokens, demand.output)

    def _tokens(self, demand: Demand, index: int) -> list[int]:
        """Ids that are equal where texts are: what the prefix index compares."""
        tokens: list[int] = []
        for kind, number, length in demand.parts:
            text = (kind, index if kind == "own" else number)
            tokens += [self._texts.setdefault(text, len(self._texts))] * length
        return tokens

    def _on_step(self, now: float, stage: int, place: int) -> None:
        found = self._stages[stage]
        got, ended = found.engines[place].end(now)
        done = set(ended)
        for index in got:
            self._token(now, stage, index)
            if index in done:
                self._finish(now, stage, index)
        self._begin(now, stage, place)

    def _token(self, now: float, stage: int, index: int) -> None:
        outcome = self._outcomes[index]
        late = self._system.first_from == "decode" and self._stages[stage].prompts
        outcome.completion_tokens += 1
        if late:
            return
        if outcome.last is not None:
            outcome.gaps.append(now - outcome.last)
        elif outcome.first is None:
            outcome.first = now
        outcome.last = now

    def _finish(self, now: float, stage: int, index: int) -> None:
        outcome, demand = self._outcomes[index], self._demands[index]
        if self._stages[stage].prompts and demand.output > 1:
            assert isinstance(self._deployed, Split)
            wait = transfer_seconds(
                self._shape, self._deployed.prefill, self._cluster, demand.input
            )
            self._push(now + wait, "arrive", index, 1)
            return
        outcome.first = now if outcome.first is None else outcome.first
        outcome.last = outcome.ended = now
        outcome.finish_reason = "length"
        if self._traffic.users is not None:
            for following in self._next:
                self._ask(following, now)
                break


def simulate(
    shape: ModelShape,
    deployed: ServingStrategy | Split,
    cluster: Cluster,
    traffic: Traffic,
    *,
    prefix_cache: bool | None = None,
) -> Simulation:
    """Run the traffic through the engines. Raises PlanError for a model or request that never fits.

    `prefix_cache`: None looks whether the requests share anything.
    """
    return Simulator(shape, deployed, cluster, traffic, prefix_cache=prefix_cache).run()


def _devices(deployed: ServingStrategy | Split) -> int:
    if isinstance(deployed, Split):
        return deployed.devices
    return deployed.engine_ranks * deployed.layout.dp_replicate
