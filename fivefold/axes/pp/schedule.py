"""A pipeline schedule is data: which rank holds which stages, and each rank's order of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.axes.pp.action import Action, Kind

# Of one stage and micro-batch: hidden states, the gradient handed to the stage before.
Value = tuple[str, int, int]


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is what each rank does; `placement[stage]` the rank that holds a stage.

    The model is cut into `stages` parts. With `directions=2` every part exists twice: stages 0 …
    S-1 are the copy whose micro-batches run from rank 0 upward, stages S … 2S-1 the parts 0 … S-1
    again, run in the other direction. Micro-batch i takes direction i % directions.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    directions: int = 1

    def part(self, stage: int) -> int:
        """Which part of the model, 0 … stages-1, a stage computes."""
        return stage % self.stages

    def preceding(self, stage: int) -> int | None:
        """The stage whose hidden states this one takes; None: it takes tokens."""
        return stage - 1 if stage % self.stages else None

    def following(self, stage: int) -> int | None:
        """The stage that takes this one's hidden states; None: it computes the loss."""
        return stage + 1 if (stage + 1) % self.stages else None

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def microbatches_of(self, stage: int) -> range:
        """The micro-batches that pass through `stage`."""
        return range(stage // self.stages, self.microbatches, self.directions)

    def made_by(self, action: Action) -> Value:
        """The value that others may wait for once `action` is done."""
        made = {"F": "hidden", "B": "gradient", "I": "gradient", "W": "weights"}[action.kind]
        return made, action.stage, action.microbatch

    def needed_by(self, action: Action) -> list[Value]:
        """The values without which `action` cannot start."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "W":
            return [("gradient", stage, microbatch)]
        if action.kind == "F":
            before = self.preceding(stage)
            return [] if before is None else [("hidden", before, microbatch)]
        after = self.following(stage)
        own: list[Value] = [("hidden", stage, microbatch)]
        return own if after is None else [*own, ("gradient", after, microbatch)]

    def receiver(self, action: Action) -> int | None:
        """The stage on another rank that waits for what `action` makes, if there is one."""
        if action.kind == "W":
            return None
        onward = self.following if action.kind == "F" else self.preceding
        stage = onward(action.stage)
        if stage is None or self.placement[stage] == self.placement[action.stage]:
            return None
        return stage


def straight(ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(ranks))


def looped(ranks: int, virtual: int) -> tuple[int, ...]:
    """Stage s on rank s % ranks: around the ranks `virtual` times."""
    return tuple(range(ranks)) * virtual


def folded(ranks: int) -> tuple[int, ...]:
    """A V: down the ranks and up again, two stages on each."""
    return (*range(ranks), *reversed(range(ranks)))


class Order:
    """One rank's actions as they are written down; counts the micro-batches of each kind.

    `numbers` are the micro-batches of each stage, in the order in which they pass.
    """

    def __init__(self, numbers: dict[int, Sequence[int]]) -> None:
        self.actions: list[Action] = []
        self._numbers = numbers
        self._done: dict[tuple[Kind, int], int] = {}
        self._owed: list[Action] = []

    def forward(self, stage: int) -> None:
        """The next micro-batch's forward."""
        self._add("F", "F", stage)

    def backward(self, stage: int) -> None:
        """The next micro-batch's whole backward."""
        self._add("B", "I", stage)

    def for_input(self, stage: int) -> None:
        """The next micro-batch's backward for the input; its W is owed from now on."""
        action = self._add("I", "I", stage)
        self._owed.append(Action("W", stage, action.microbatch))

    def for_weights(self) -> None:
        """The W that has been owed for longest; nothing if none is."""
        if self._owed:
            self.actions.append(self._owed.pop(0))

    def take_owed(self) -> list[Action]:
        """All W that are owed, for the caller to place."""
        owed, self._owed = self._owed, []
        return owed

    @property
    def owed(self) -> int:
        """How many I have no W yet."""
        return len(self._owed)

    def forwards(self, stage: int) -> int:
        """Forwards of `stage` so far."""
        return self._done.get(("F", stage), 0)

    def _add(self, kind: Kind, counted_as: Kind, stage: int) -> Action:
        place = self._done.get((counted_as, stage), 0)
        self._done[counted_as, stage] = place + 1
        action = Action(kind, stage, self._numbers[stage][place])
        self.actions.append(action)
        return action
