"""Tokens to experts on other ranks, and back, by all-to-all (GShard, Lepikhin et al. 2020).

Rank r of the group holds experts [r X/R, (r + 1) X/R). Nothing is dropped or padded here: what
moves is M D elements each way, twice again in backward, and 8 X bytes of counts.
"""

from __future__ import annotations

# N tokens, D hidden, K experts a token, X experts, R ranks, L = X/R experts here, M rows here
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.ep.collectives import exchange, exchange_counts
from fivefold.core.errors import LayoutError
from fivefold.model.dispatch import RunExperts, by_expert, combine, spread


class AllToAllDispatch:
    """An ExpertDispatcher over the ranks of `group`, all of which call it together."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group = group
        self.experts = experts
        self.ranks = dist.get_world_size(group)
        check_experts(experts, self.ranks)
        self.local = experts // self.ranks

    def __call__(
        self,
        hidden: Tensor,
        choice: Tensor,
        weight: Tensor,
        run: RunExperts,
        *,
        dropless: bool = True,
    ) -> Tensor:
        """See ExpertDispatcher: [N,D] of this rank's tokens to [N,D]."""
        order, counts = by_expert(choice, self.experts)
        arriving = exchange_counts(counts, self.group).view(self.ranks, self.local)
        sent, received = self._sizes(len(order), counts, arriving)
        order = order[: sum(sent)]  # dropped ones are last
        rows = exchange(spread(hidden, order, choice.shape[1]), sent, received, self.group)
        # Rows come by rank, and of each rank by expert: bring those of an expert together.
        expert = torch.arange(self.local, device=hidden.device).repeat(self.ranks)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0])
        together = expert.argsort(stable=True)
        answers = run(spread(rows, together, 1), arriving.sum(0))
        apart = torch.empty_like(together).index_copy_(
            0, together, torch.arange(len(together), device=hidden.device)
        )
        back = exchange(spread(answers, apart, 1), received, sent, self.group)
        return combine(back, order, weight)

    def _sizes(self, rows: int, counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from each rank, of `rows` that are here: the one copy to the host."""
        leaving = counts.view(self.ranks, self.local).sum(1)
        sent, received = torch.stack((leaving, arriving.sum(1))).tolist()
        return sent, received


class EvenAllToAllDispatch(AllToAllDispatch):
    """The same with the sizes of even load, whatever the load is: for fake tensors alone.

    They have no counts; what they are run for is shapes, bytes and the order of collectives.
    """

    def _sizes(self, rows: int, counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int]]:
        each = [rows // self.ranks + (rank < rows % self.ranks) for rank in range(self.ranks)]
        here = each[dist.get_rank(self.group)]
        return each, [here] * self.ranks


def check_experts(experts: int, ranks: int) -> None:
    """Raise LayoutError where `ranks` do not hold equally many experts."""
    if experts % ranks:
        nearest = max(n for n in range(1, ranks + 1) if experts % n == 0)
        raise LayoutError(
            f"layout ep={ranks} does not divide the model's {experts} experts",
            f"use ep={nearest}",
        )
