"""When each rank does what, if every pass takes a given time."""

from __future__ import annotations

from dataclasses import dataclass

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


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Every rank follows its order and does each action as soon as what it needs is there.

    Messages travel beside the computation. Spans come in the order of their starts. Raises
    LayoutError if the ranks end up waiting for one another.
    """
    costs = costs or Costs()
    there: dict[tuple[Value, int], float] = {}  # when a value can be used, on which rank
    next_of = [0] * schedule.ranks
    free = [0.0] * schedule.ranks
    spans: list[Span] = []
    messages: list[Message] = []
    while waiting := [r for r in range(schedule.ranks) if next_of[r] < len(schedule.orders[r])]:
        starts = {r: _start(schedule, r, next_of[r], free[r], there) for r in waiting}
        able = [(start, r) for r, start in starts.items() if start is not None]
        if not able:
            raise _stuck(schedule, waiting, next_of)
        start, rank = min(able)
        action = schedule.orders[rank][next_of[rank]]
        end = start + costs.of(action.kind)
        spans.append(Span(rank, action, start, end))
        next_of[rank] += 1
        free[rank] = end
        there[schedule.made_by(action), rank] = end
        receiver = schedule.receiver(action)
        if receiver is not None:
            target = schedule.placement[receiver]
            there[schedule.made_by(action), target] = end + costs.send
            messages.append(Message(action, receiver, rank, target, end, end + costs.send))
    return Timeline(schedule, tuple(spans), tuple(messages))


def _start(
    schedule: Schedule, rank: int, place: int, free: float, there: dict[tuple[Value, int], float]
) -> float | None:
    """When `rank` can start its action at `place`; None: something is not under way yet."""
    needed = [
        there.get((value, rank)) for value in schedule.needed_by(schedule.orders[rank][place])
    ]
    if any(time is None for time in needed):
        return None
    return max([free, *(time for time in needed if time is not None)])


def _stuck(schedule: Schedule, waiting: list[int], next_of: list[int]) -> LayoutError:
    def first(rank: int) -> Action:
        return schedule.orders[rank][next_of[rank]]

    stuck = "; ".join(f"rank {rank} at {first(rank).in_words}" for rank in waiting)
    return LayoutError(
        f"in schedule {schedule.name} the ranks wait for one another: {stuck}",
        "an action must come after those that it depends on",
    )
