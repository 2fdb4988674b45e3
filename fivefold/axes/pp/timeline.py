"""Actions with their times, simulated or measured, and what can be read off them."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.schedule import Schedule


@dataclass(frozen=True)
class Span:
    """`rank` did `action` from `start` to `end`."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Message:
    """What `action` made, on its way from rank `source` to the stage `receiver` on `target`."""

    action: Action
    receiver: int
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times are in the unit of the costs, or in seconds if measured; the first start is 0."""

    schedule: Schedule
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()

    def of(self, rank: int) -> list[Span]:
        """One rank's spans in order."""
        return [span for span in self.spans if span.rank == rank]

    @property
    def makespan(self) -> float:
        """From the start of the first to the end of the last action of any rank."""
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def short_action(self) -> float:
        """The time that a tenth of the actions do not exceed: a measure to draw by."""
        lengths = sorted(span.end - span.start for span in self.spans)
        return lengths[len(lengths) // 10]

    def busy(self, rank: int) -> float:
        """Time `rank` computes."""
        return sum(span.end - span.start for span in self.of(rank))

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time, from first start to last end, in which they idle."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.schedule.ranks * self.makespan)

    def idle_inside(self, rank: int) -> float:
        """Time `rank` idles between its own first and last action.

        "Zero bubble" is meant so: the ranks start one after another, and the time that a late one
        loses at the start it makes up at the end, if the optimizer need not wait for all.
        """
        spans = self.of(rank)
        return spans[-1].end - spans[0].start - self.busy(rank)

    def peak_in_flight(self, rank: int) -> int:
        """The most activations (of one stage for one micro-batch) that `rank` keeps at one time.

        Kept from the forward until the backward is over; where it is split, until W is, which still
        needs the inputs of the weights' products and the gradients of their outputs.
        """
        kept = peak = 0
        for span in self.of(rank):
            if span.action.kind == "F":
                kept += 1
                peak = max(peak, kept)
            elif span.action.kind in ("B", "W"):
                kept -= 1
        return peak

    def peak_share(self, rank: int) -> float:
        """`peak_in_flight` in micro-batches of one p-th of the model, as 1F1B's stages are."""
        return self.peak_in_flight(rank) * self.schedule.ranks / self.schedule.stages
