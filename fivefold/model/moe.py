"""A mixture of experts in place of a feed-forward: route, dispatch, add what all tokens share."""

from __future__ import annotations

# B batch, S sequence, N = B S tokens, D hidden, X experts, K chosen experts
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fivefold.model.capacity import capacity, drop_beyond
from fivefold.model.config import ModelConfig
from fivefold.model.dispatch import DROPPED, ExpertDispatcher, LocalDispatch
from fivefold.model.experts import Experts
from fivefold.model.feed_forward import FeedForward
from fivefold.model.load import LoadCounter
from fivefold.model.router import Router
from fivefold.model.side_loss import BalanceLosses, counts_by_row

# This rank's choices [B,S,K] to those of the whole sequences [B,S',K], and where its own are there.
GatherChoices = Callable[[Tensor], tuple[Tensor, Tensor | slice]]


class MixtureOfExperts(nn.Module):
    """See Router, Experts and ExpertDispatcher for the parts; axes replace the attributes.

    dispatcher: how tokens reach experts.
    losses, capacity_factor: set by `balance.configure`.
    sequence_sum: adds up over the ranks that hold other parts of the same sequences.
    gather_choices: brings together what those ranks chose; needed for a capacity alone.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.moe is not None, "a mixture of experts has its sizes from config.moe"
        self.moe = config.moe
        self.layer = layer
        self.router = Router(config, self.moe)
        self.experts = Experts(config, self.moe)
        self.shared = FeedForward(config, self.moe.shared_size) if self.moe.shared_size else None
        self.dispatcher: ExpertDispatcher = LocalDispatch(self.moe.experts)
        self.losses: BalanceLosses | None = None
        self.capacity_factor: float | None = None
        self.sequence_sum: Callable[[Tensor], Tensor] = _itself
        self.gather_choices: GatherChoices = _own
        self.load = LoadCounter(self.moe.experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B,S,D] to [B,S,D]."""
        rows = hidden.shape[0]
        tokens = hidden.flatten(0, 1)
        routing = self.router(tokens)
        choice = self._kept(routing.choice, rows)
        dropless = self.capacity_factor is None
        routed = self.dispatcher(tokens, choice, routing.weight, self.experts, dropless=dropless)
        if torch.is_grad_enabled():
            counts = counts_by_row(routing.choice, rows, self.moe.experts)
            self.load.add(counts.sum(0), None if dropless else (choice == DROPPED).sum())
            if self.losses is not None:
                routed = self.losses.attach(routed, routing, counts, self.moe, self.sequence_sum)
        routed = routed.view_as(hidden)
        return routed if self.shared is None else routed + self.shared(hidden)

    def _kept(self, choice: Tensor, rows: int) -> Tensor:
        """`choice` [N,K] less what goes beyond the experts' capacity."""
        if self.capacity_factor is None:
            return choice
        whole, places = self.gather_choices(choice.unflatten(0, (rows, -1)))
        tokens = whole.shape[0] * whole.shape[1]
        limit = capacity(tokens, self.moe.top_k, self.moe.experts, self.capacity_factor)
        return drop_beyond(whole, self.moe.experts, limit)[:, places].flatten(0, 1)


def _itself(x: Tensor) -> Tensor:
    return x


def _own(choice: Tensor) -> tuple[Tensor, slice]:
    return choice, slice(None)
