"""Requests as the simulation takes them: when they come, how long they are, what they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import PlanError
from fivefold.engines.serve.load import arrivals
from fivefold.engines.serve.load.traces import TraceRow, read_azure, read_mooncake
from fivefold.engines.serve.load.workload import Asked, Fit, from_trace, made_up

KINDS = {"azure": read_azure, "mooncake": read_mooncake}


@dataclass(frozen=True, slots=True)
class Demand:
    """One request. parts: (name of a text, its tokens): texts of one name begin alike."""

    at: float
    output: int
    parts: tuple[tuple[str, int, int], ...]

    @property
    def input(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, _, count in self.parts)


@dataclass(frozen=True)
class Traffic:
    """`users` ask again when they are answered; None: requests come at their own times."""

    demands: tuple[Demand, ...]
    name: str
    users: int | None = None

    def __post_init__(self) -> None:
        if not self.demands:
            raise PlanError("the traffic has no request", "give at least one")
        if self.users is not None and self.users < 1:
            raise PlanError(f"{self.users} users", "give at least one")

    @property
    def rate(self) -> float | None:
        """Arrivals a second; None where they wait for answers."""
        if self.users is not None or len(self.demands) < 2:
            return None
        span = self.demands[-1].at - self.demands[0].at
        return (len(self.demands) - 1) / span if span > 0 else None

    @property
    def input_tokens(self) -> float:
        """Of a prompt, on average."""
        return sum(each.input for each in self.demands) / len(self.demands)

    @property
    def output_tokens(self) -> float:
        """Of an answer, on average."""
        return sum(each.output for each in self.demands) / len(self.demands)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(each.input + each.output for each in self.demands)

    @property
    def shares(self) -> bool:
        """Whether prompts share their beginnings."""
        return any(part[0] != "own" for each in self.demands for part in each.parts)


def steady(
    rate: float,
    input_tokens: int,
    output_tokens: int,
    *,
    requests: int = 400,
    spread: float = 0.0,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Traffic:
    """Poisson arrivals of `rate` a second."""
    _positive(rate=rate, input_tokens=input_tokens, output_tokens=output_tokens)
    asked = made_up(
        requests, input_tokens, output_tokens, spread=spread, shared_prefix=shared_prefix, seed=seed
    )
    times = arrivals.poisson(requests, rate, seed)
    if requests > 1:  # exactly the rate that was asked for, not one that was drawn
        scale = (requests - 1) / rate / (times[-1] - times[0])
        times = [(at - times[0]) * scale for at in times]
    name = f"{rate:g} requests/s, {input_tokens} in, {output_tokens} out"
    return Traffic(tuple(_demands(asked, times)), name)


def closed(
    users: int,
    input_tokens: int,
    output_tokens: int,
    *,
    requests: int | None = None,
    shortest: float = 1.0,
    seed: int = 0,
) -> Traffic:
    """`users` ask at once, again when answered; lengths lie between `shortest` and 1 of those given.

    `requests` in all; ten for each user where it is not said.
    """
    _positive(users=users, input_tokens=input_tokens, output_tokens=output_tokens)
    if not 0 < shortest <= 1:
        raise PlanError(f"shortest={shortest}", "give a share above 0, at most 1")
    middle = (1 + shortest) / 2
    asked = made_up(
        requests or 10 * users,
        round(input_tokens * middle),
        round(output_tokens * middle),
        spread=(1 - shortest) / (1 + shortest),
        seed=seed,
    )
    name = f"{users} at once, {input_tokens} in, {output_tokens} out"
    return Traffic(tuple(_demands(asked, [0.0] * len(asked))), name, users)


def trace(
    kind: str,
    path: Path,
    *,
    requests: int | None = None,
    speed: float = 1.0,
    fit: Fit | None = None,
) -> Traffic:
    """The first `requests` of a recorded trace; `speed`: its times pass so many times as fast."""
    if kind not in KINDS:
        raise PlanError(f"unknown kind of trace {kind!r}", f"known: {', '.join(KINDS)}")
    rows: Sequence[TraceRow] = KINDS[kind](path)[:requests]
    asked = from_trace(rows, fit or Fit(), speed)
    return Traffic(
        tuple(_demands(asked, [each.at or 0.0 for each in asked])),
        f"{path.name}, {len(asked)} requests" + (f", {speed:g} times as fast" * (speed != 1)),
    )


def faster(traffic: Traffic, factor: float) -> Traffic:
    """The same requests, `factor` times as many a second."""
    demands = tuple(Demand(d.at / factor, d.output, d.parts) for d in traffic.demands)
    return Traffic(demands, traffic.name, traffic.users)


def every(traffic: Traffic, count: int, place: int) -> Traffic:
    """What the `place`-th of `count` engines gets of it, taken in turn."""
    users = None if traffic.users is None else max(1, traffic.users // count)
    return Traffic(traffic.demands[place::count], traffic.name, users)


def _demands(asked: Iterable[Asked], times: Sequence[float]) -> list[Demand]:
    return [
        Demand(at, each.output_tokens, each.parts)
        for each, at in zip(asked, times, strict=True)
    ]  # fmt: skip


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise PlanError(f"{name}={value}", "give a number above 0")
