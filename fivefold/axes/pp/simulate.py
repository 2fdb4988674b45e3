"""When each rank does what, if every pass takes a given time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from fivefold.axes.pp.action import Action, Kind
from fivefold.axes.pp.schedule import Schedule, Value
from fivefold.axes.pp.timeline import Message, Span, Timeline
from fivefold.core.errors import LayoutError


@dataclass(frozen=True)
class Costs:
    """Times of one stage for one micro-batch, in any unit; `send` from one rank to another."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0

    @classmethod
    def checked(cls, forward: float, input: float, weight: float, send: float) -> Costs:
        """From a user's numbers. Raises LayoutError unless passes take time and messages no less than none."""
        for what, cost in (("forward", forward), ("input", input), ("weight", weight)):
            if not 0 < cost < float("inf"):
                raise LayoutError(
                    f"a {what} pass cannot take the time {cost:g}", "give it more than 0"
                )
        if not 0 <= send < float("inf"):
            raise LayoutError(f"a message cannot take the time {send:g}", "give it 0 or more")
        return cls(forward, input, weight, send)

    def of(self, kind: Kind) -> float:
        """The time of an action."""
        backward = self.input + self.weight
        return {"F": self.forward, "B": backward, "I": self.input, "W": self.weight}[kind]


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] | None = None) -> Timeline:
    """Every rank follows its order and does each action as soon as what it needs is there.

    `costs`: of every stage, or one for each part of the model (`schedule.part`). Messages travel
    beside the computation. Spans come in the order of their starts. Raises LayoutError if the ranks
    end up waiting for one another.
    """
    return _Simulation(schedule, _each(schedule, costs)).run()


def _each(schedule: Schedule, costs: Costs | Sequence[Costs] | None) -> Sequence[Costs]:
    """Costs by part."""
    if costs is None or isinstance(costs, Costs):
        return (costs or Costs(),) * schedule.stages
    if len(costs) != schedule.stages:
        raise LayoutError(
            f"{len(costs)} costs are given for the {schedule.stages} parts of {schedule.name}",
            "give one for each part of the model",
        )
    return costs


class _Simulation:
    """Ranks that can go on wait in a heap by their start; others at the value that they lack."""

    def __init__(self, schedule: Schedule, costs: Sequence[Costs]) -> None:
        self.schedule, self.costs = schedule, costs
        self.there: dict[tuple[Value, int], float] = {}  # when a value can be used, on which rank
        self.next_of = [0] * schedule.ranks
        self.free = [0.0] * schedule.ranks
        self.able: list[tuple[float, int]] = []
        self.lacking: dict[tuple[Value, int], int] = {}
        self.spans: list[Span] = []
        self.messages: list[Message] = []

    def run(self) -> Timeline:
        for rank in range(self.schedule.ranks):
            self._look(rank)
        while self.able:
            start, rank = heappop(self.able)
            self._do(rank, start)
            self._look(rank)
        waiting = [
            r for r in range(self.schedule.ranks) if self.next_of[r] < len(self.schedule.orders[r])
        ]
        if waiting:
            raise _stuck(self.schedule, waiting, self.next_of)
        return Timeline(self.schedule, tuple(self.spans), tuple(self.messages))

    def _look(self, rank: int) -> None:
        """Whether `rank` can start its next action, and when; else note what it lacks."""
        order, place = self.schedule.orders[rank], self.next_of[rank]
        if place == len(order):
            return
        start = self.free[rank]
        for value in self.schedule.needed_by(order[place]):
            time = self.there.get((value, rank))
            if time is None:
                self.lacking[value, rank] = rank
                return
            start = max(start, time)
        heappush(self.able, (start, rank))

    def _do(self, rank: int, start: float) -> None:
        schedule = self.schedule
        action = schedule.orders[rank][self.next_of[rank]]
        costs = self.costs[schedule.part(action.stage)]
        end = start + costs.of(action.kind)
        self.spans.append(Span(rank, action, start, end))
        self.next_of[rank] += 1
        self.free[rank] = end
        made = schedule.made_by(action)
        self._come(made, rank, end)
        receiver = schedule.receiver(action)
        if receiver is not None:
            target = schedule.placement[receiver]
            self.messages.append(Message(action, receiver, rank, target, end, end + costs.send))
            self._come(made, target, end + costs.send)

    def _come(self, value: Value, rank: int, time: float) -> None:
        """`value` is on `rank` from `time` on; a rank that lacked it looks again."""
        self.there[value, rank] = time
        if self.lacking.pop((value, rank), None) is not None:
            self._look(rank)


def _stuck(schedule: Schedule, waiting: list[int], next_of: list[int]) -> LayoutError:
    def first(rank: int) -> Action:
        return schedule.orders[rank][next_of[rank]]

    stuck = "; ".join(f"rank {rank} at {first(rank).in_words}" for rank in waiting)
    return LayoutError(
        f"in schedule {schedule.name} the ranks wait for one another: {stuck}",
        "an action must come after those that it depends on",
    )
