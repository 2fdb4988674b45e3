"""What is asked of a serving plan, as a user writes it, and what it means."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.engines.serve.load.slo import parse_slo
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving import traffic as loads
from fivefold.plan.serving.software import software
from fivefold.plan.serving.speculation import Speculation
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import Traffic

SPECULATED = re.compile(r"(0?\.\d+|0|1)\s*x\s*(\d+)(?:\s*@\s*(\d*\.?\d+))?")
FEWEST, SECONDS, MOST = 200, 40, 2000
"""Requests that are simulated: `SECONDS` of them, so that what begins empty fills up."""
TOKENS, ANYWAY = 2_000_000, 24
"""Tokens of all that are simulated at most, but for so many requests in any case."""
MOST_USERS = 20_000
TRACE_REQUESTS = 2000


@dataclass(frozen=True)
class Question:
    """The options of `fivefold plan serve`, unread."""

    layout: str | None = None
    split: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    input_tokens: int = 2000
    output_tokens: int = 300
    spread: float = 0.0
    shared_prefix: int = 0
    trace: str | None = None
    trace_file: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    slo: str | None = None
    share: float = 0.95
    weights: str | None = None
    kv: str | None = None
    system: str = "fivefold"
    max_sequences: int = 256
    token_budget: int | None = None
    speculate: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        loads_given = [self.rate is not None, self.concurrency is not None, self.trace is not None]
        if sum(loads_given) > 1:
            raise PlanError(
                "--rate, --concurrency and --trace are three kinds of load", "give one of them"
            )
        if (self.trace is None) != (self.trace_file is None):
            raise PlanError("--trace says the kind of --trace-file", "give both, or neither")
        self._check_numbers()
        if not 0 < self.share <= 1:
            raise PlanError(f"--share is {self.share}", "give a share above 0, at most 1")
        if self.split is not None and self.layout is None:
            raise PlanError("--split needs --layout", "give the layout of either kind of engine")
        _ = self.limits, self.speculation

    def _check_numbers(self) -> None:
        """Raise PlanError for numbers that no traffic has."""
        for name, value, least in (
            ("rate", self.rate, 0), ("speed", self.speed, 0), ("concurrency", self.concurrency, 0),
            ("input-tokens", self.input_tokens, 0), ("output-tokens", self.output_tokens, 0),
            ("requests", self.requests, 0), ("max-sequences", self.max_sequences, 0),
            ("token-budget", self.token_budget, 0), ("spread", self.spread, -1),
            ("shared-prefix", self.shared_prefix, -1),
        ):  # fmt: skip
            if value is not None and not (value > least and math.isfinite(value)):
                raise PlanError(
                    f"--{name} is {value}",
                    "give a number above 0" if least == 0 else "give 0 or more",
                )
        if (self.concurrency or 0) > MOST_USERS:
            raise PlanError(
                f"--concurrency {self.concurrency} is more than a simulation takes ({MOST_USERS:,})",
                "plan an equal share of the users on a share of the devices",
            )

    @property
    def limits(self) -> dict[str, float]:
        """The SLO in seconds."""
        return {} if self.slo is None else parse_slo(self.slo)

    @property
    def traffic(self) -> Traffic | None:
        """The load; None where none was given."""
        if self.trace is not None:
            assert self.trace_file is not None
            return loads.trace(
                self.trace, self.trace_file, requests=self.requests or TRACE_REQUESTS,
                speed=self.speed,
            )  # fmt: skip
        if self.rate is not None:
            return loads.steady(
                self.rate, self.input_tokens, self.output_tokens,
                requests=self.requests or self._enough, spread=self.spread,
                shared_prefix=self.shared_prefix, seed=self.seed,
            )  # fmt: skip
        if self.concurrency is not None:
            return loads.closed(
                self.concurrency, self.input_tokens, self.output_tokens,
                requests=self.requests or max(2 * self.concurrency, min(10 * self.concurrency, MOST)),
                seed=self.seed,
            )  # fmt: skip
        return None

    @property
    def _enough(self) -> int:
        wanted = max(FEWEST, min(MOST, math.ceil((self.rate or 0.0) * SECONDS)))
        return max(ANYWAY, min(wanted, TOKENS // (self.input_tokens + self.output_tokens)))

    def strategy(self, cluster: Cluster) -> ServingStrategy:
        """An engine, of the layout that is given or of one device."""
        wide = "bf16" if "bf16" in cluster.device.peak else "fp16"
        if wide not in cluster.device.peak:
            wide = "fp32"
        return ServingStrategy(
            layout=Layout() if self.layout is None else Layout.parse(self.layout),
            weights=self.weights or wide,
            kv=self.kv or wide,
            max_sequences=self.max_sequences,
            token_budget=self.token_budget,
            speculation=self.speculation,
            system=software(self.system),
        )

    def deployed(self, cluster: Cluster) -> ServingStrategy | Split:
        """What `layout` and `split` say."""
        strategy = self.strategy(cluster)
        if self.split is None:
            return strategy
        match = re.fullmatch(r"(\d+)\s*\+\s*(\d+)", self.split.strip())
        if match is None:
            raise PlanError(f"--split {self.split!r} is no PREFILL+DECODE", "write e.g. 2+3")
        return Split(strategy, int(match[1]), strategy, int(match[2]))

    @property
    def speculation(self) -> Speculation | None:
        """What `speculate` says."""
        if self.speculate is None:
            return None
        match = SPECULATED.fullmatch(self.speculate.strip())
        if match is None:
            raise PlanError(
                f"--speculate {self.speculate!r} is no RATE x TOKENS", "write e.g. 0.7x4"
            )
        cost = {} if match[3] is None else {"cost": float(match[3])}
        return Speculation(float(match[1]), int(match[2]), **cost)
