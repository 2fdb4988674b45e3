"""A strategy that a user has in mind: a layout, and what else of it they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from fivefold.core.errors import LayoutError, nearest, one_line
from fivefold.core.layout import Layout, parse_assignments
from fivefold.plan.search.found import Found, judge
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.space import RECOMPUTE, pipes
from fivefold.plan.search.valid import check, check_devices, divisors
from fivefold.plan.workload import Recompute, Strategy

OWN = ("micro_batch", "recompute")


@dataclass(frozen=True)
class Guess:
    """`said` are the names that were given: the best is looked for of what is not."""

    layout: Layout
    said: frozenset[str]
    micro_batch: int | None = None
    recompute: Recompute | None = None


def parse_guess(text: str) -> Guess:
    """`tp=8,pp=4,dp=2,micro_batch=1,recompute=full`; `dp` is dp_shard.

    Raises LayoutError that names what is wrong.
    """
    own: dict[str, str] = {}
    rest = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, separator, value = (each.strip() for each in part.partition("="))
        if name in OWN:
            own[name] = value
        else:
            rest.append(f"dp_shard{separator}{value}" if name == "dp" else part)
    values = parse_assignments(",".join(rest))
    said = frozenset((*values, *own))
    try:
        layout = Layout(**values)
    except ValidationError as error:
        raise LayoutError(f"layout {text!r}: {one_line(error.errors()[0]['msg'])}") from None
    return Guess(layout, said, _micro_batch(own), _recompute(own))


def _micro_batch(own: dict[str, str]) -> int | None:
    value = own.get("micro_batch")
    if value is None:
        return None
    if not value.isdigit() or int(value) < 1:
        raise LayoutError(f"layout micro_batch={value!r} is no whole number above 0", "use 1, 2, …")
    return int(value)


def _recompute(own: dict[str, str]) -> Recompute | None:
    value: Any = own.get("recompute")
    if value is not None and value not in RECOMPUTE:
        raise LayoutError(f"layout recompute={value!r} is not known", nearest(value, RECOMPUTE))
    return value  # type: ignore[no-any-return]


def filled(guess: Guess, devices: int) -> Guess:
    """With data ranks for the devices that the other axes leave, if none were said."""
    layout = guess.layout
    if guess.said & {"dp_shard", "dp_replicate"} or devices % layout.world_size:
        return guess
    ways = devices // layout.world_size
    return replace(guess, layout=layout.model_copy(update={"dp_shard": ways}))


def judge_guess(job: Job, guess: Guess, estimators: Estimators) -> Found:
    """The guess, with the best of what it leaves open; the leanest where nothing fits.

    Left open may be the micro-batch, recomputation, the ZeRO stage, and then the schedule.
    Raises LayoutError where it cannot be run, with the mend.
    """
    guess = filled(guess, job.devices)
    check_devices(guess.layout, job.devices)
    found, refused = _judged(job, _open(job, guess), estimators)
    if not found:
        raise refused or _no_batch(job, guess)
    best = _better(found)
    if guess.layout.pp > 1 and "schedule" not in guess.said:
        others, _ = _judged(job, _schedules(job, best.strategy), estimators)
        best = _better([best, *others])
    return best


def _judged(
    job: Job, strategies: Iterable[Strategy], estimators: Estimators
) -> tuple[list[Found], LayoutError | None]:
    """Those that can be run, and why the first other one cannot."""
    found: list[Found] = []
    refused: LayoutError | None = None
    for strategy in strategies:
        try:
            check(job, strategy)
        except LayoutError as error:
            refused = refused or error
        else:
            found.append(judge(job, strategy, estimators))
    return found, refused


def _better(found: list[Found]) -> Found:
    """The fastest that fits, or the leanest."""
    fitting = [each for each in found if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.seconds)
    return min(found, key=lambda each: each.bytes)


def _no_batch(job: Job, guess: Guess) -> LayoutError:
    batch, dp = job.training.global_batch, guess.layout.dp
    return LayoutError(
        f"a global batch of {batch} does not divide over the {dp} data ranks of {guess.layout}",
        f"use batch={max(1, round(batch / dp)) * dp}",
    )


def _open(job: Job, guess: Guess) -> Iterator[Strategy]:
    layout, batch = guess.layout, job.training.global_batch
    batches: tuple[int, ...] = ()
    if guess.micro_batch is not None:
        batches = (guess.micro_batch,)
    elif batch % layout.dp == 0:
        batches = divisors(batch // layout.dp)
    modes = RECOMPUTE if guess.recompute is None else (guess.recompute,)
    zeros = (layout.zero,) if "zero" in guess.said or layout.shards == 1 else (1, 2, 3)
    for zero in zeros:
        for size in batches:
            for mode in modes:
                yield Strategy(layout.model_copy(update={"zero": zero}), size, mode)


def _schedules(job: Job, strategy: Strategy) -> Iterator[Strategy]:
    layout = strategy.layout
    for pipe in pipes(job, layout.pp, strategy.microbatches(job.training)):
        update = {"schedule": pipe.schedule, "virtual": pipe.virtual}
        yield replace(strategy, layout=layout.model_copy(update=update))
