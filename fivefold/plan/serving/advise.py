"""How many devices, in which engines, serve traffic within its limits.

For each engine that the model fits in: the roofline says how many requests a second it can take;
a search over rates, each simulated, finds how many it takes with `share` of them within the limits;
that gives the number of engines, which is then simulated whole. Prefill and decode apart: numbers
of either from the rooflines, then one more of the kind that misses its limit, until both meet it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.core.errors import PlanError
from fivefold.engines.serve.load.measures import Summary
from fivefold.engines.serve.load.slo import Slo
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.bounds import Bounds, check_possible
from fivefold.plan.serving.curve import best_within
from fivefold.plan.serving.options import engines
from fivefold.plan.serving.simulate import Simulation, simulate
from fivefold.plan.serving.step import prefill
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import Traffic, every, faster
from fivefold.plan.shape import ModelShape

TRIALS = 4
"""Rates that are simulated for an engine."""
PROBES, LIVES = 160, 4
"""Requests of a trial at least, and how many times the life of one it lasts."""
BUSY = 0.7
"""Share of its time that an engine for prompts is planned to read: beyond, queues grow fast."""
MENDS = 6
"""Times that one more engine is added to a split."""
BEYOND = 10.0
"""Times the roofline's rate: what is less is simulated, and told by how much it is too much."""
WHOLE = 3000
"""Requests of the final simulation at most."""


@dataclass(frozen=True)
class Option:
    """A way to serve the traffic, as simulated."""

    deployed: ServingStrategy | Split
    simulation: Simulation
    summary: Summary
    devices: int
    rate: float
    """Requests a second that it was simulated with."""
    most: float
    """Requests a second that such a deployment takes within the limits."""
    fits: bool
    """Whether the cluster has the devices, and the limits are met."""

    @property
    def name(self) -> str:
        """In a few words."""
        if isinstance(self.deployed, Split):
            split = self.deployed
            return (
                f"apart: {split.prefill_engines} x ({split.prefill.layout}) read,"
                f" {split.decode_engines} x ({split.decode.layout}) write"
            )
        return f"{self.deployed.layout.dp_replicate} x ({_one(self.deployed)})"

    @property
    def share(self) -> float:
        """Of requests that were within all limits; 1 without any."""
        found = self.summary.goodput_share
        return 1.0 if found is None else found

    def dollars(self, cluster: Cluster) -> float | None:
        """Of a million tokens written, at the price of the devices."""
        price = cluster.device.price
        tokens = self.summary.output_throughput * 3600
        return None if price is None or not tokens else price * self.devices / tokens * 1e6


@dataclass(frozen=True)
class ServingPlan:
    """Options, the best first, and what bounds all of them."""

    options: tuple[Option, ...]
    bounds: Bounds
    traffic: Traffic
    slo: Slo

    @property
    def best(self) -> Option:
        """The first."""
        return self.options[0]


def plan_serving(
    shape: ModelShape,
    cluster: Cluster,
    traffic: Traffic,
    slo: Slo,
    like: ServingStrategy,
    *,
    share: float = 0.95,
    split: bool = True,
    most_options: int = 3,
) -> ServingPlan:
    """Deployments for open traffic, fewest devices first; `like` gives all but the layout.

    Raises PlanError for limits that nothing can meet, saying the bound, and for traffic that the
    cluster is too small for, saying how much it takes.
    """
    rate = traffic.rate
    if rate is None:
        raise PlanError(
            "a search needs requests that come at their own times", "give --rate or --trace"
        )
    candidates = engines(shape, cluster, like)
    limits = check_possible(shape, candidates, cluster, traffic, slo)
    ranked = _ranked(shape, candidates, cluster, traffic, slo)[:most_options]
    if ranked and not traffic.shares:  # what the cache holds need not be read
        _check_rate(shape, ranked[0], cluster, traffic, rate, slo)
    found = [
        option
        for strategy in ranked
        if (option := _together(shape, strategy, cluster, traffic, rate, slo, share)) is not None
    ]
    if split and ranked:
        apart = _apart(shape, ranked[0], cluster, traffic, rate, slo, share)
        if apart is not None:
            found.append(apart)
    found.sort(key=lambda each: (not each.fits, each.devices, -each.share))
    if not found or not found[0].fits:
        raise _too_small(found, cluster, traffic, rate, share)
    return ServingPlan(tuple(found), limits, traffic, slo)


def _ranked(
    shape: ModelShape, candidates: Sequence[ServingStrategy], cluster: Cluster, traffic: Traffic,
    slo: Slo,
) -> list[ServingStrategy]:  # fmt: skip
    """By the requests a second that a device takes at most, by the roofline."""
    prompt, answer = round(traffic.input_tokens), round(traffic.output_tokens)
    rated = []
    for place, strategy in enumerate(candidates):
        found = best_within(shape, strategy, cluster, prompt, answer, slo.get("tpot"))
        read = prefill(shape, strategy, cluster, prompt) + strategy.system.front
        if found is None or read > slo.get("ttft", math.inf):
            continue
        rated.append((-found.requests_per_second / strategy.engine_ranks, place, strategy))
    return [strategy for _, _, strategy in sorted(rated, key=lambda each: each[:2])]


def _check_rate(
    shape: ModelShape, best: ServingStrategy, cluster: Cluster, traffic: Traffic, rate: float,
    slo: Slo,
) -> None:  # fmt: skip
    """Raise PlanError for rates far beyond the roofline: simulating them would take minutes."""
    prompt, answer = round(traffic.input_tokens), round(traffic.output_tokens)
    top = best_within(shape, best, cluster, prompt, answer, slo.get("tpot"))
    assert top is not None  # it was ranked by this
    bound = top.requests_per_second / best.engine_ranks * cluster.devices
    if rate > BEYOND * bound:
        raise PlanError(
            f"{rate:g} requests/s are impossible on {cluster.name}: by the roofline its"
            f" {cluster.devices} devices take {bound:.3g} at most ({best.layout})",
            f"lower the rate, or take {math.ceil(rate / bound * cluster.devices):,} devices",
        )


def most_rate(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, traffic: Traffic, slo: Slo,
    share: float,
) -> float:  # fmt: skip
    """Requests a second that one engine takes with `share` within the limits; 0: not one alone."""
    prompt, answer = round(traffic.input_tokens), round(traffic.output_tokens)
    top = best_within(shape, strategy, cluster, prompt, answer, slo.get("tpot"))
    rate = traffic.rate
    if top is None or rate is None:
        return 0.0
    life = top.ttft + answer * top.tpot
    count = max(PROBES, math.ceil(LIVES * life * top.requests_per_second))
    few = Traffic(traffic.demands[:count], traffic.name)
    known = few.rate or rate
    low, high = 0.0, top.requests_per_second * 1.1
    trial = high * 0.7
    for _ in range(TRIALS):
        run = simulate(shape, strategy, cluster, faster(few, trial / known))
        if (run.summary(slo).goodput_share or 0.0) >= share or not slo:
            low = trial
        else:
            high = trial
        trial = (low + high) / 2 if low else high / 2
    return low


def _together(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, traffic: Traffic, rate: float,
    slo: Slo, share: float,
) -> Option | None:  # fmt: skip
    each = most_rate(shape, strategy, cluster, traffic, slo, share)
    if not each:
        return None
    copies = max(1, math.ceil(rate / each - 1e-9))
    option = _option(
        shape, _copied(strategy, copies), cluster, traffic, rate, each * copies, slo, share
    )
    while option.share < share and option.devices <= cluster.devices and copies < rate / each + 3:
        copies += 1  # what one engine takes alone is a little more than in the whole
        option = _option(
            shape, _copied(strategy, copies), cluster, traffic, rate, each * copies, slo, share
        )
    return option


def _apart(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, traffic: Traffic, rate: float,
    slo: Slo, share: float,
) -> Option | None:  # fmt: skip
    prompt, answer = round(traffic.input_tokens), round(traffic.output_tokens)
    read = prefill(shape, strategy, cluster, prompt)
    writes = best_within(shape, strategy, cluster, 1, prompt + answer, slo.get("tpot"))
    if writes is None:
        return None
    kept = rate * answer * writes.step / max(1, writes.batch)
    reading, writing = math.ceil(rate * read / BUSY), max(1, math.ceil(kept / BUSY))
    found = None
    for _ in range(MENDS):
        deployed = Split(strategy, reading, strategy, writing)
        found = _option(shape, deployed, cluster, traffic, rate, rate, slo, share)
        if found.fits or found.devices > cluster.devices:
            break
        late = found.summary.latencies["ttft"]
        limit = slo.get("ttft", math.inf)
        if late is not None and late.percentiles[95] > limit:
            reading += 1
        else:
            writing += 1
    return found


def _option(
    shape: ModelShape, deployed: ServingStrategy | Split, cluster: Cluster, traffic: Traffic,
    rate: float, most: float, slo: Slo, share: float,
) -> Option:  # fmt: skip
    """Simulated whole; of very long traffic, an engine's part of it."""
    devices = deployed.devices if isinstance(deployed, Split) else (
        deployed.engine_ranks * deployed.layout.dp_replicate
    )  # fmt: skip
    run_of, shown = deployed, Traffic(traffic.demands[:WHOLE], traffic.name)
    if isinstance(deployed, ServingStrategy) and devices > cluster.devices:
        copies = deployed.layout.dp_replicate
        run_of, shown = _copied(deployed, 1), every(traffic, copies, 0)
    run = simulate(shape, run_of, cluster, shown)
    summary = run.summary(slo)
    good = 1.0 if summary.goodput_share is None else summary.goodput_share
    return Option(
        deployed, run, summary, devices, rate, most, good >= share and devices <= cluster.devices
    )


def _copied(strategy: ServingStrategy, copies: int) -> ServingStrategy:
    layout = strategy.layout.model_copy(update={"dp_replicate": copies})
    return replace(strategy, layout=layout)


def _one(strategy: ServingStrategy) -> str:
    return str(strategy.layout.model_copy(update={"dp_replicate": 1}))


def _too_small(
    found: Sequence[Option], cluster: Cluster, traffic: Traffic, rate: float, share: float
) -> PlanError:
    if not found:
        return PlanError(
            f"no engine of {cluster.name} answers {share:.0%} of the requests within the limits",
            "allow more time, or take other devices",
        )
    best = min(found, key=lambda each: each.devices)
    if best.devices <= cluster.devices:
        return PlanError(
            f"{best.name} answers {best.share:.1%} of {rate:g} requests/s within the limits,"
            f" {share:.0%} are asked for",
            "allow more time, or ask for a smaller share (--share)",
        )
    most = best.most * cluster.devices / best.devices
    return PlanError(
        f"{rate:g} requests/s need {best.devices} {cluster.device.name} ({best.name}), but"
        f" {cluster.name} has {cluster.devices}",
        f"it takes {most:.2g} requests/s at most: lower the rate, or take more devices",
    )
