"""Which experts a token goes to, and with what weight.

Softmax top-k (Shazeer et al. 2017, Jiang et al. 2024) and sigmoid scores (DeepSeek-AI 2024b),
groups of experts (DeepSeek-AI 2024a), and the bias of balancing without a loss (Wang et al. 2024).
"""

from __future__ import annotations

# N tokens, D hidden, X experts, K chosen experts, G groups of experts
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fivefold.kernels.linear import linear
from fivefold.model.config import ModelConfig, MoEConfig

TINY = 1e-20  # sigmoid scores may all round to zero


class Routing(NamedTuple):
    """logits and scores [N,X]; choice [N,K], int64 expert numbers; weight [N,K], all of experts."""

    logits: Tensor
    scores: Tensor
    choice: Tensor
    weight: Tensor


class Router(nn.Module):
    """Scores every expert in fp32 (fp64 for fp64 states), whatever the model's format.

    bias: [X] in fp32 or wider, where the family balances by one; it takes part in choosing alone.
    replay: given each choice [N,K], says what is chosen instead; see `replay.py`.
    """

    bias: Tensor | None

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, config.hidden_size))
        bias = torch.zeros(moe.experts, dtype=torch.float32) if moe.correction_bias else None
        self.register_buffer("bias", bias)
        self.replay: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Routing:
        """Route [N,D]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = linear(hidden.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.moe.score == "softmax" else _sigmoid(logits)
        choice = self.choose(scores.detach())
        if self.replay is not None:
            choice = self.replay(choice)
        weight = scores.gather(1, choice)
        if self.moe.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + TINY)
        return Routing(logits, scores, choice, weight * self.moe.scale)

    def choose(self, scores: Tensor) -> Tensor:
        """The best experts [N,K] by score and bias, inside the best groups."""
        moe = self.moe
        ranking = scores if self.bias is None else scores + self.bias
        if moe.top_groups < moe.groups:
            members = ranking.unflatten(-1, (moe.groups, -1))
            best = _group_scores(members, moe)
            chosen = best.topk(moe.top_groups, sorted=False).indices
            barred = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            ranking = members.masked_fill(barred.unsqueeze(-1), float("-inf")).flatten(1)
        return ranking.topk(moe.top_k).indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves and conversions of the module: the bias never becomes narrower than fp32.

        Its steps are of a thousandth; bf16 could not count them.
        """
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.itemsize < before.itemsize:
            self.bias = before.to(self.bias.device)
        return self


def _sigmoid(x: Tensor) -> Tensor:
    """As softmax of (x, 0): torch's CPU sigmoid rounds the end of a tensor differently.

    The last elements go through other code there, so that a score depends on how many tokens
    are beside it; the reduction of a softmax does not.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def _group_scores(members: Tensor, moe: MoEConfig) -> Tensor:
    """[N,G,X/G] to [N,G]."""
    if moe.group_score == "max":
        return members.amax(-1)
    return members.topk(2, dim=-1).values.sum(-1)
