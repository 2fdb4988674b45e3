"""Experts divided over ranks that all have the same tokens: no token moves, answers are summed.

As in serving, where tensor ranks hold whole hidden states between blocks. What moves is the sum of
N D elements a layer, however many experts a token goes to.
"""

from __future__ import annotations

# N tokens, D hidden, K experts a token, X experts, R ranks
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from fivefold.axes.ep.dispatch import check_experts
from fivefold.model.dispatch import DROPPED, LocalDispatch, RunExperts


class SameTokensDispatch:
    """An ExpertDispatcher over the ranks of `group`, all of which call it with equal arguments.

    Rank r holds experts [r X/R, (r + 1) X/R). It has no gradient.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group = group
        ranks = dist.get_world_size(group)
        check_experts(experts, ranks)
        self.here = LocalDispatch(experts // ranks)
        self.first = dist.get_rank(group) * self.here.experts

    def __call__(
        self,
        hidden: Tensor,
        choice: Tensor,
        weight: Tensor,
        run: RunExperts,
        *,
        dropless: bool = True,
    ) -> Tensor:
        """See ExpertDispatcher."""
        own = choice - self.first
        own = own.masked_fill((own < 0) | (own >= self.here.experts), DROPPED)
        share = self.here(hidden, own, weight, run, dropless=False)
        return functional.wait_tensor(functional.all_reduce(share, "sum", self.group))
