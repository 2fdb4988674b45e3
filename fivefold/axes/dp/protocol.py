"""What the training step knows of the data axis, whatever is replicated or sharded beneath."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.part import Part, Slice


@dataclass(frozen=True)
class Cut:
    """What the other axes made of a module's parameters, by the decoder's names.

    slices: where in the whole each lies. sums: groups over which its gradient is to be added
    besides the data axis, because each rank of the group computes a part of it.
    """

    slices: Mapping[str, Slice]
    sums: tuple[tuple[str, dist.ProcessGroup], ...] = ()


class DataAxis(Protocol):
    """Masters and gradients of one model, or of one stage of it, over data-parallel ranks."""

    module: nn.Module  # call this for forward and loss

    def masters(self) -> dict[str, Part]:
        """fp32 parameters by the decoder's names: what this rank holds of each."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of this rank's part of each master; valid after `reduce`."""
        ...

    def begin(self, last: bool, times: Mapping[str, int] | None = None) -> None:
        """Announce a micro-batch; gradients are communicated during the last one's backward.

        times: for micro-batches whose backwards take turns, how many gradients come of each
        parameter.
        """
        ...

    def reduce(self) -> None:
        """Wait for communication: gradients are then the SUM over all ranks that compute them."""
        ...

    def publish(self) -> None:
        """Bring the compute parameters after the masters."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def carried(self) -> dict[str, Tensor]:
        """What this rank alone carries over from step to step (memories of compressors): the
        tensors themselves, to be saved, or filled to go on."""
        ...


def decoder_name(name: str) -> str:
    """A parameter's name in the Decoder, without the prefixes of what wraps it."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return re.sub(r"^(\d+\.)?decoder\.", "", name)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, which have data ranks of their own."""
    return ".experts." in name
