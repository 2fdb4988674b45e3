"""A limit to what one expert takes, and who goes without (GShard, Lepikhin et al. 2020)."""

from __future__ import annotations

# B rows of a batch, S places, K chosen experts, X experts
import math

import torch
from torch import Tensor

from fivefold.model.dispatch import DROPPED


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Tokens that one expert takes: `factor` times its even share, rounded up."""
    return math.ceil(factor * tokens * top_k / experts)


def drop_beyond(choice: Tensor, experts: int, limit: int) -> Tensor:
    """`choice` [B,S,K] with DROPPED where an expert had `limit` tokens before.

    Tokens come in the order of their place in the sequence, and at one place in the order of rows,
    so that no token is dropped because of a later one: a model that is cut off by its own future
    could not be sampled from. All choices of a token count alike, the first and the last.
    Weights of what is left stay as they are.
    """
    rows, places, ways = choice.shape
    flat = choice.transpose(0, 1).flatten()
    chosen, order = flat.sort(stable=True)
    numbers = torch.arange(experts, device=choice.device)
    starts = torch.searchsorted(chosen, numbers)
    before = torch.arange(len(flat), device=choice.device) - starts[chosen]
    taken = torch.empty_like(flat, dtype=torch.bool).index_copy_(0, order, before < limit)
    return choice.where(taken.view(places, rows, ways).transpose(0, 1), DROPPED)
