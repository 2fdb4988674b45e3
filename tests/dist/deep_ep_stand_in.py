"""What DeepEP's Buffer does, over gloo: a token to each rank of its experts, answers summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.ep.collectives import _all_to_all as all_to_all


class _Sizes:
    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


@dataclass
class _Handle:
    """`tokens`: those sent, to rank 0 first; how many to and from each rank."""

    tokens: Tensor
    sent: list[int]
    received: list[int]
    count: int


class Buffer:
    def __init__(self, group: dist.ProcessGroup, near: int, far: int) -> None:
        assert near > 0 and far > 0
        self.group = group
        self.ranks = dist.get_world_size(group)

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _Sizes())

    def get_dispatch_layout(self, choice: Tensor, experts: int) -> tuple[Any, ...]:
        each = experts // self.ranks
        owner = torch.where(choice >= 0, choice // each, -1)
        is_in = torch.stack([(owner == rank).any(-1) for rank in range(self.ranks)], dim=1)
        per_expert = torch.stack([(choice == expert).sum() for expert in range(experts)])
        return is_in.sum(0), None, per_expert, is_in, None

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: _Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            rows = all_to_all(x[handle.tokens], handle.sent, handle.received, self.group)
            return rows, None, None, None, handle, None
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        rank, tokens = is_token_in_rank.T.nonzero(as_tuple=True)
        sent = is_token_in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        made = _Handle(tokens, sent.tolist(), received.tolist(), len(x))
        each = len(num_tokens_per_expert) // self.ranks
        local = topk_idx[tokens] - (rank * each).unsqueeze(-1)
        mine = (topk_idx[tokens] >= 0) & (local >= 0) & (local < each)
        rows, weights, numbers = (
            all_to_all(t, made.sent, made.received, self.group)
            for t in (x[tokens], topk_weights[tokens] * mine, local.where(mine, -1))
        )
        return rows, numbers, weights, None, made, None

    def combine(
        self, x: Tensor, handle: _Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        def back(t: Tensor) -> Tensor:
            arrived = all_to_all(t, handle.received, handle.sent, self.group)
            return t.new_zeros(handle.count, t.shape[1]).index_add(0, handle.tokens, arrived)

        return back(x), None if topk_weights is None else back(topk_weights), None
