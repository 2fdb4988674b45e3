"""New weights into a decoder that serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.core.errors import nearest
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.model.decoder import Decoder
from fivefold.model.projection import Projection

Shapes = Mapping[str, torch.Size]


def shapes_of(decoder: Decoder) -> dict[str, torch.Size]:
    """The shape of every weight by name."""
    return {name: tensor.shape for name, tensor in decoder.state_dict().items()}


def check_state(own: Shapes, state: Mapping[str, Tensor], partial: bool) -> None:
    """Raise EngineError for names and shapes that are not the decoder's, all before a change."""
    for name, tensor in state.items():
        if name not in own:
            raise EngineError(f"the model has no weight {name}", nearest(name, own))
        if tensor.shape != own[name]:
            raise EngineError(
                f"{name} is {list(own[name])}, not {list(tensor.shape)}",
                "give weights of the same model",
            )
    missing = next((name for name in own if name not in state), None)
    if missing is not None and not partial:
        raise EngineError(
            f"the new weights have no {missing}", "give all of them, or say partial=True"
        )


@torch.no_grad()
def copy_state(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy, converting formats, into the memory that the decoder has."""
    own = decoder.state_dict()
    for name, tensor in state.items():
        own[name].copy_(tensor)


class ServedWeights:
    """A decoder's weights and the memory of its cache: changed, given back, taken again.

    Who changes them forgets what was computed with the old ones.
    """

    def __init__(self, runner: PagedRunner) -> None:
        self._decoder = decoder = runner.decoder
        self._cache = runner.cache
        self._lowered = runner.lowered
        self._shapes = shapes_of(decoder)
        self._packs = decoder.packed_head is not None
        self.sleeping = 0
        """0 awake; 1 without memory for keys and values; 2 without weights either."""

    def update(self, state: Mapping[str, Tensor], partial: bool = False) -> None:
        """Copy new weights into the decoder's own."""
        if self.sleeping == 2:
            raise EngineError("the engine sleeps without weights", "give them to wake_up")
        check_state(self._shapes, state, partial)
        copy_state(self._decoder, state)

    def sleep(self, level: int) -> None:
        """Give memory back."""
        if level not in (1, 2) or self.sleeping:
            raise EngineError(
                f"sleep level {level} while sleeping at {self.sleeping}", "1 or 2, while awake"
            )
        self._cache.take_memory(0)
        if level == 2:
            self._unpack()
            for parameter in self._decoder.parameters():
                parameter.data = parameter.data.new_empty(0)
        self.sleeping = level

    def wake_up(self, state: Mapping[str, Tensor] | None) -> None:
        """Take the memory again."""
        if self.sleeping == 2 and state is None:
            raise EngineError("the engine sleeps without weights", "give them to wake_up")
        if state is not None:
            check_state(self._shapes, state, partial=False)
        if self.sleeping == 2:
            for name, parameter in self._decoder.named_parameters():
                parameter.data = parameter.data.new_empty(self._shapes[name])
        if state is not None:
            copy_state(self._decoder, state)
        if self.sleeping:
            self._cache.take_memory(self._cache.num_blocks)
        self.sleeping = 0

    def repack(self) -> None:
        """Bring what is packed beside the weights up to date with them."""
        if self.sleeping == 2:
            return
        if self._lowered is not None:
            self._lowered.repack()
        elif self._packs:
            self._decoder.pack()

    def _unpack(self) -> None:
        if self._lowered is not None:
            self._lowered.release()
        self._decoder.packed_head = None
        for module in self._decoder.modules():
            if isinstance(module, Projection):
                module.packed = None
