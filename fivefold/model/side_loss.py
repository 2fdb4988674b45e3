"""Losses on routing that keep experts evenly loaded, fed in where their layer is.

They do not travel to the end of the model: an identity in forward hands them their slope in
backward. So they work alike on any stage of a pipeline and under recomputation.

All are SUMS in the unit of the main loss (a sum over tokens): a coefficient c adds c per token
when load is even. Every token counts, padding too.
"""

from __future__ import annotations

# N = B S tokens, B rows of a batch, X experts, K chosen experts
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.model.config import MoEConfig
from fivefold.model.router import Routing


class SideLoss:
    """`scale`: what the step multiplies its loss by before backward. One object for all layers."""

    def __init__(self) -> None:
        self.scale = 1.0


@dataclass(frozen=True)
class BalanceLosses:
    """Coefficients, and where the scale comes from."""

    auxiliary: float  # over the tokens of a micro-batch (Fedus et al. 2021)
    sequence: float  # over each row of it by itself (DeepSeek-AI 2024b, equation 17)
    router_z: float  # on the square of log(sum(exp(logits))) (Zoph et al. 2022)
    side: SideLoss

    def attach(
        self,
        output: Tensor,
        routing: Routing,
        counts: Tensor,
        moe: MoEConfig,
        sequence_sum: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """`output` unchanged, with the losses hung on it; `counts` [B,X] are this rank's tokens."""
        losses = []
        if self.auxiliary or self.sequence:
            whole = sequence_sum(counts.to(routing.scores.dtype))
            shares = probabilities(routing.scores, moe).unflatten(0, (counts.shape[0], -1)).sum(1)
            losses.append(self.auxiliary * balance(whole.sum(0), shares.sum(0)))
            losses.append(self.sequence * balance(whole, shares).sum())
        if self.router_z:
            losses.append(self.router_z * routing.logits.logsumexp(-1).square().sum())
        return _Attach.apply(output, sum(losses), self.side) if losses else output


def probabilities(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Scores [N,X] that add up to 1 for each token."""
    return scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)


def balance(counts: Tensor, shares: Tensor) -> Tensor:
    """T sum_i f_i P_i over the last dim, with f_i = X counts_i / (K T) and P_i = shares_i / T.

    `counts` are those of all T tokens; `shares`, sums of probabilities, may be of a part of them:
    the parts' losses then add up to the whole's, and their gradients are right each by itself.
    """
    return counts.shape[-1] * (counts * shares).sum(-1) / counts.sum(-1).clamp(min=1)


def counts_by_row(choice: Tensor, rows: int, experts: int) -> Tensor:
    """How many of each row's choices [N,K] fell on each expert: int64 [B,X]."""
    chosen = choice.view(rows, -1).sort(dim=-1).values
    numbers = torch.arange(experts, device=choice.device).expand(rows, -1).contiguous()
    ends = torch.searchsorted(chosen, numbers, right=True)
    return ends.diff(dim=-1, prepend=ends.new_zeros(rows, 1))


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, side: SideLoss) -> Tensor:
        ctx.side, ctx.dtype = side, loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope = torch.full((), ctx.side.scale, dtype=ctx.dtype, device=grads[0].device)
        return grads[0], slope, None
