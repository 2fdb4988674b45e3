"""Each rank's actions with its sends and receives between them.

All ranks' programs are parts of one line of events, in which a message follows what makes it and
comes before what needs it. Take the earliest event on that line that has not happened: everything
before it has, so every rank that takes part in it has come to it. Hence the ranks never wait in a
circle, even if a send ends only when its receive is there (NCCL), and two ranks name their messages
to each other in the same order (NCCL knows no tags).
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.simulate import simulate


@dataclass(frozen=True, slots=True)
class Transfer:
    """What `action` made goes from rank `source` to the stage `receiver` on rank `target`."""

    action: Action
    receiver: int
    source: int
    target: int

    @property
    def in_words(self) -> str:
        """For messages: `hidden states of micro-batch 3 for stage 2`."""
        what = "hidden states" if self.action.kind == "F" else "gradient"
        return f"{what} of micro-batch {self.action.microbatch} for stage {self.receiver}"


Step = Action | Transfer


def programs(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The program of every rank: its order, and its transfers at their places."""
    timeline = simulate(schedule)
    # What is sent at a time comes before what starts then and may need it.
    events: list[tuple[float, int, Step, tuple[int, ...]]] = []
    for span in timeline.spans:
        events.append((span.start, 1, span.action, (span.rank,)))
    for message in timeline.messages:
        transfer = Transfer(message.action, message.receiver, message.source, message.target)
        events.append((message.start, 0, transfer, (message.source, message.target)))
    events.sort(key=lambda event: event[:2])  # stable: spans of one time stay in their order
    found: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    for _, _, step, ranks in events:
        for rank in ranks:
            found[rank].append(step)
    return tuple(tuple(steps) for steps in found)
