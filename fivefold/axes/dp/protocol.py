"""What the training step knows of the data axis, whatever is replicated or sharded beneath."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class DataAxis(Protocol):
    """Masters and gradients of one model over data-parallel ranks."""

    module: nn.Module  # call this for forward and loss

    def masters(self) -> dict[str, Tensor]:
        """fp32 parameters by the decoder's names: DTensor(Shard(0)) where sharded, else plain."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of this rank's part of each master; valid after `reduce`."""
        ...

    def begin(self, last: bool) -> None:
        """Announce a micro-batch; gradients are communicated during the last one's backward."""
        ...

    def reduce(self) -> None:
        """Wait for communication: gradients are then the SUM over data ranks."""
        ...

    def publish(self) -> None:
        """Bring the compute parameters after the masters."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over all data ranks."""
        ...

    def sum_shards(self, value: Tensor) -> Tensor:
        """`value` summed over the ranks that hold different parts of the masters."""
        ...


def decoder_name(name: str) -> str:
    """A parameter's name in the Decoder, without the prefixes of what wraps it."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name.removeprefix("decoder.")
