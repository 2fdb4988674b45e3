"""What a rank of a pipeline does at one time: one pass of one stage for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
MEANING: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
}


@dataclass(frozen=True, slots=True)
class Action:
    """`B` is a whole backward: `I` and `W` in one go.

    `I` (backward for the input) gives the gradient that the preceding stage waits for; `W` the
    gradients of the weights, for which nobody waits (Qi et al. 2023, arXiv 2401.10241).
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def in_words(self) -> str:
        """For messages: `forward of micro-batch 3 on stage 1`."""
        return f"{MEANING[self.kind]} of micro-batch {self.microbatch} on stage {self.stage}"
