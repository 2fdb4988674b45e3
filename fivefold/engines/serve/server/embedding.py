"""Hidden states of a prompt, pooled to one vector. Runs in the engine's process."""

from __future__ import annotations

# N tokens, D hidden
from torch import Tensor

from fivefold.engines.serve.server.messages import Pooling


def pool(states: Tensor, pooling: Pooling) -> list[float]:
    """[N,D] to [D]: the mean over a prompt's states after the final norm, in fp32, or the last."""
    states = states.float()
    pooled = states.mean(dim=0) if pooling == "mean" else states[-1]
    return pooled.tolist()
