"""New weights into a decoder that serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.core.errors import nearest
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.model.decoder import Decoder


def check_state(decoder: Decoder, state: Mapping[str, Tensor], partial: bool) -> None:
    """Raise EngineError for names and shapes that are not the decoder's, all before a change."""
    own = decoder.state_dict()
    for name, tensor in state.items():
        if name not in own:
            raise EngineError(f"the model has no weight {name}", nearest(name, own))
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"{name} is {list(own[name].shape)}, not {list(tensor.shape)}",
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
