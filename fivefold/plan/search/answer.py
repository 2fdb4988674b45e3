"""What a plan answers: the best strategy, what else is worth knowing, and where the guess stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fivefold.core.errors import LayoutError, PlanError, nearest
from fivefold.plan.hardware.device import Device
from fivefold.plan.search.change import Change, change_of, nothing_fits
from fivefold.plan.search.found import Found
from fivefold.plan.search.front import front
from fivefold.plan.search.guess import Guess, judge_guess
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.refine import refine, width_of
from fivefold.plan.search.search import FINER, Counts, search

Objective = Literal["time", "cost", "memory"]
HALVINGS = 4  # of the nodes, for the front of time and cost
MARGIN = 0.02  # of memory that stays free where it can: a ledger is exact of state alone
GLANCE = 200  # strategies that are judged for each of these


@dataclass(frozen=True)
class Answer:
    """`ranking`: the best of each shape, best first; `front`: of time, memory and cost.

    guess: the user's own, judged; refused: why it cannot be run; change: with which it would fit.
    """

    job: Job
    objective: Objective
    ranking: tuple[Found, ...]
    front: tuple[Found, ...]
    counts: Counts
    guess: Found | None = None
    refused: LayoutError | None = None
    change: Change | None = None
    place: int | None = None  # of the guess's shape in the ranking, from 1

    @property
    def winner(self) -> Found:
        """The best."""
        return self.ranking[0]

    @property
    def runner_up(self) -> Found | None:
        """The best of another shape."""
        return self.ranking[1] if len(self.ranking) > 1 else None


@dataclass
class Asked:
    """What is asked beside the job. others: devices to name where nothing fits."""

    guess: Guess | None = None
    objective: Objective = "time"
    wanted: int = 8
    smaller: bool = True  # look at fewer nodes, too
    others: tuple[Device, ...] = field(default_factory=tuple)


def check_objective(text: str) -> Objective:
    """Raise PlanError for an objective that is none."""
    if text not in get_args(Objective):
        raise PlanError(f"unknown objective {text!r}", nearest(text, get_args(Objective)))
    return text  # type: ignore[return-value]


def answer(job: Job, estimators: Estimators, asked: Asked) -> Answer:
    """Search, refine, judge the guess.

    Raises PlanError where nothing fits, with the smallest change that would.
    """
    result = search(job, estimators, wanted=asked.wanted, margin=MARGIN)
    if not result.best:
        result = search(job, estimators, wanted=asked.wanted)
    if not result.best:
        raise nothing_fits(job, estimators, asked.others)
    ranking = sorted((refine(each, estimators) for each in result.best), key=_seconds)
    guess, refused = _guess(job, estimators, asked.guess)
    if guess is not None and guess.fits:
        ranking = _with(ranking, guess)
    smaller = _smaller(job, estimators) if asked.smaller else []
    points = _thinned(front([*ranking, *result.front, *smaller], _measures))
    ranking = _by(asked.objective, ranking, points)
    change = None if guess is None or guess.fits else change_of(guess, estimators)
    return Answer(
        job, asked.objective, tuple(ranking), tuple(points), result.counts, guess, refused, change,
        _place(ranking, guess),
    )  # fmt: skip


def _guess(
    job: Job, estimators: Estimators, guess: Guess | None
) -> tuple[Found | None, LayoutError | None]:
    if guess is None:
        return None, None
    try:
        return judge_guess(job, guess, estimators), None
    except LayoutError as error:
        return None, error


def _with(ranking: list[Found], guess: Found) -> list[Found]:
    """The ranking with a guess that is better than what its shape has there."""
    same = [i for i, each in enumerate(ranking) if _shape(each) == _shape(guess)]
    if same and guess.seconds < ranking[same[0]].seconds:
        ranking = [*ranking[: same[0]], guess, *ranking[same[0] + 1 :]]
    elif not same and guess.seconds < ranking[-1].seconds:
        ranking = [*ranking, guess]
    return sorted(ranking, key=_seconds)


def _smaller(job: Job, estimators: Estimators) -> list[Found]:
    """The fastest that a short search finds on half, a quarter, … of the nodes, while something fits."""
    found: list[Found] = []
    nodes = job.cluster.nodes
    for _ in range(HALVINGS):
        if nodes % 2:
            break
        nodes //= 2
        smaller = job.on(nodes)
        best = search(
            smaller, estimators, wanted=1, with_front=False, budget=GLANCE, margin=MARGIN
        ).best
        if not best:
            break
        found.append(best[0])
    return found


def _thinned(points: list[Found]) -> list[Found]:
    """Without those that save little memory over a faster one on the same devices."""
    kept: list[Found] = []
    least: dict[int, float] = {}
    for each in points:
        devices, memory = each.job.devices, each.job.cluster.device.memory
        if each.bytes < least.get(devices, float("inf")) - FINER * memory:
            kept.append(each)
            least[devices] = each.bytes
    return kept


def _by(objective: Objective, ranking: list[Found], points: list[Found]) -> list[Found]:
    """The ranking, led by what the objective wants."""
    if objective == "time":
        return ranking
    key = (lambda f: f.device_seconds) if objective == "cost" else (lambda f: f.bytes)
    first = min(points, key=key)
    return [first, *(each for each in ranking if each is not first)]


def _place(ranking: list[Found], guess: Found | None) -> int | None:
    if guess is None:
        return None
    places = [i for i, each in enumerate(ranking, 1) if _shape(each) == _shape(guess)]
    return places[0] if places else None


def _shape(found: Found) -> tuple[object, ...]:
    layout = found.strategy.layout
    return replace(width_of(layout), ulysses=1, cp_kind="ring"), layout.pp, found.job.devices


def _seconds(found: Found) -> float:
    return found.seconds


def _measures(found: Found) -> tuple[float, float, float]:
    return found.seconds, found.bytes, found.device_seconds
