"""What a pipeline rank has under way at each of its actions, from the schedule that is executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from operator import ge

from fivefold.axes.pp.action import Kind
from fivefold.axes.pp.build import DEFAULT_VIRTUAL, PLAIN
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.schedules import interleaved

# Schedules come to a steady state; what is under way does not grow with more micro-batches.
STEADY = 4  # times the ranks
WINDOW = 4  # messages whose tensors `axes.pp.wire` keeps until they are over


@dataclass(frozen=True)
class Moment:
    """One action of `stage` (counted among the rank's own), with what is kept before it.

    kept: micro-batches of each of the rank's stages between forward and backward; aside: between
    backward for the input and that for the weights.
    """

    kind: Kind
    stage: int
    kept: tuple[int, ...]
    aside: tuple[int, ...]
    sent: int = 0


@dataclass(frozen=True)
class Flight:
    """Of one rank. parts: which part of the model each of its stages computes."""

    parts: tuple[int, ...]
    moments: tuple[Moment, ...]


@lru_cache(maxsize=4096)
def flights(schedule: str, ranks: int, microbatches: int, virtual: int) -> tuple[Flight, ...]:
    """Of every rank; moments that another one outdoes in every number are left out."""
    if ranks == 1:
        return (Flight((0,), (Moment("F", 0, (0,), (0,)), Moment("B", 0, (1,), (0,)))),)
    if schedule in ("gpipe", "1f1b"):
        return tuple(
            _straight(
                rank,
                ranks,
                microbatches if schedule == "gpipe" else min(ranks - rank, microbatches),
                microbatches,
            )
            for rank in range(ranks)
        )
    built = _build(schedule, ranks, microbatches, virtual)
    return tuple(_flight(built, rank) for rank in range(ranks))


def stages_of(schedule: str, ranks: int, virtual: int) -> int:
    """Parts that the model is cut into."""
    if schedule == "interleaved":
        return ranks * (virtual if virtual > 1 else DEFAULT_VIRTUAL)
    return 2 * ranks if schedule in ("zbv", "dualpipe-v") else ranks


def _straight(rank: int, ranks: int, most: int, microbatches: int) -> Flight:
    """`most` micro-batches are kept while the last of them comes, and the first goes."""
    back = min(WINDOW, microbatches - most) if rank else 0
    found = []
    moments: tuple[tuple[Kind, int], ...] = (("F", most - 1), ("B", most))
    for kind, kept in moments:
        forth = min(WINDOW, microbatches - (kind == "F")) if rank < ranks - 1 else 0
        found.append(Moment(kind, 0, (kept,), (0,), forth + back))
    return Flight((rank,), tuple(found))


def _build(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """The schedule, with as many micro-batches as show its steady state, and unchecked then."""
    if name == "interleaved":
        stages = virtual if virtual > 1 else DEFAULT_VIRTUAL
        few = STEADY * ranks
        if microbatches % ranks == 0 and microbatches > few:
            return interleaved.build(ranks, few, stages)
        return interleaved.build(ranks, microbatches, stages)
    return PLAIN[name](ranks, min(microbatches, STEADY * ranks))


def _flight(schedule: Schedule, rank: int) -> Flight:
    held = schedule.held(rank)
    index = {stage: place for place, stage in enumerate(held)}
    kept, aside = [0] * len(held), [0] * len(held)
    sent: Counter[int] = Counter()
    seen: set[Moment] = set()
    for action in schedule.orders[rank]:
        place = index[action.stage]
        held_back = sum(min(WINDOW, count) for count in sent.values())
        seen.add(Moment(action.kind, place, tuple(kept), tuple(aside), held_back))
        receiver = schedule.receiver(action)
        if receiver is not None:
            sent[schedule.placement[receiver]] += 1
        if action.kind == "F":
            kept[place] += 1
        elif action.kind == "W":
            aside[place] -= 1
        else:
            kept[place] -= 1
            aside[place] += action.kind == "I"
    return Flight(tuple(schedule.part(stage) for stage in held), _highest(seen))


def _highest(moments: set[Moment]) -> tuple[Moment, ...]:
    """Those that no other of the same action is above in every count."""
    found: dict[tuple[str, int], list[Moment]] = {}
    for one in sorted(moments, key=lambda m: -sum(m.kept) - sum(m.aside) - m.sent):
        same = found.setdefault((one.kind, one.stage), [])
        if not any(_above(other, one) for other in same):
            same.append(one)
    return tuple(one for same in found.values() for one in same)


def _above(a: Moment, b: Moment) -> bool:
    return all(map(ge, a.kept, b.kept)) and all(map(ge, a.aside, b.aside))
