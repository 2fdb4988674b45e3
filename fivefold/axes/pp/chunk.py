"""What the runtime knows of the part of a model that is one stage."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Chunk(Protocol):
    """One stage's layers with the data of its micro-batches; `index` is the micro-batch."""

    module: nn.Module  # whose projections may have their weight gradients postponed

    def forward(self, hidden: Tensor | None, index: int) -> Tensor:
        """The hidden states for the next stage; on the last one the SUM of the losses, 0-dim.

        `hidden` comes from the stage before, and is None on the first.
        """
        ...

    def hidden(self, index: int) -> tuple[torch.Size, torch.dtype]:
        """Shape and format of the hidden states that come in (asked of no first stage)."""
        ...

    def begin_backward(self, index: int, last: bool) -> None:
        """Called before the backward (whole, or for the input) of a micro-batch.

        `last`: from now on every parameter gets one more gradient, and no other. Never true of a stage
        whose backward is split for some micro-batch: gradients of several are then under way at
        one time, and may be summed over other ranks only after the batch.
        """
        ...
