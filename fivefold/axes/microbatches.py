"""Running the micro-batches of one step where every rank has the whole depth of the model."""

from __future__ import annotations

# B batch, S sequence
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fivefold.axes.dp.protocol import DataAxis
from fivefold.axes.pp.timeline import Timeline


@dataclass(frozen=True)
class Inputs:
    """A micro-batch on the device, this rank's part of its sequences: [B,S] each.

    places [S]: where in the whole row each token stands; None where the row is whole.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    places: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """As `Objective.forward` takes them."""
        return self.tokens, self.labels, self.positions, self.documents, self.places


class MicroBatches(Protocol):
    """Forward and backward of a step's micro-batches, in whatever order."""

    def accumulate(self, batches: Sequence[Inputs], scale: float) -> Tensor:
        """Add the gradients of scale * loss; this rank's loss SUM, zero where it has none."""
        ...

    def evaluate(self, batches: Sequence[Inputs]) -> Tensor:
        """The loss SUM without gradients."""
        ...

    def record(self) -> None:
        """Take the times of each action in the next `accumulate`."""
        ...

    def timeline(self) -> Timeline | None:
        """What was recorded, of all stages; None where there are none."""
        ...


class InTurn:
    """One micro-batch after the other: gradient accumulation."""

    def __init__(self, axis: DataAxis, module: nn.Module, before: Callable[[], Tensor]) -> None:
        """`before` gives the zero that losses are added to, on the right device."""
        self._axis = axis
        self._module = module
        self._zero = before

    def accumulate(self, batches: Sequence[Inputs], scale: float) -> Tensor:
        """Forward and backward of each."""
        total = self._zero()
        for index, batch in enumerate(batches):
            self._axis.begin(last=index == len(batches) - 1)
            loss = self._module(*batch.arguments())
            (loss * scale).backward()
            total = total + loss.detach()
        return total

    def record(self) -> None:
        """Nothing: there is one stage, and it never waits for another."""

    def timeline(self) -> None:
        """None."""
        return

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Inputs]) -> Tensor:
        """Forward alone."""
        total = self._zero()
        for batch in batches:
            total = total + self._module(*batch.arguments())
        return total
