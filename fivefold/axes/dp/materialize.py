"""Memory for a module that was built without any."""

from __future__ import annotations

import torch
from torch import nn


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory on `device`, with no defined values.

    A module that has values keeps them.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device=device)
