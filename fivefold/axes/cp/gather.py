"""Attention with all keys gathered (Llama 3, Dubey et al. 2024): one collective each way.

The same bytes as a ring, in one message that no computation hides; better where messages are
small or ranks few, and all keys of one layer have to fit. They are gathered again in backward
and not kept; gradients are added up in fp32 by the reduce-scatter.
"""

from __future__ import annotations

# B batch, S tokens of the row, L tokens of this rank, M the most of any rank, H query heads,
# K key/value heads, E head_dim of queries and keys, W head_dim of values, R ranks
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor

from fivefold.axes.cp.block import Rule
from fivefold.axes.cp.eager import eager
from fivefold.axes.cp.message import heads_first, pack, unpack
from fivefold.axes.cp.online import OnlineBackward, OnlineForward
from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import Run, places_of, tokens_in


class GatherAttention:
    """An attention backend for rows divided over the ranks of `group`.

    sight: of this rank's queries. runs: the places that each rank of the group holds.
    """

    def __init__(
        self, group: dist.ProcessGroup, sight: Sight, runs: Sequence[tuple[Run, ...]]
    ) -> None:
        self.group = group
        self.sight = sight
        self.runs = tuple(runs)
        self._attend = eager(_attend)
        self.keys = tuple(sorted(run for of_rank in runs for run in of_rank))
        self.most = max(tokens_in(of_rank) for of_rank in runs)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """[B,L,H,W] of this rank's [B,L,H,E], [B,L,K,E] and [B,L,K,W]."""
        return self._attend(query, key, value, self, Rule(scale, window, softcap))

    def gather(self, mine: Tensor) -> Tensor:
        """[S,B,K,E+W] in the order of places, of each rank's [L,B,K,E+W]."""
        everyone = functional.all_gather_single(self._padded(mine), 0, self.group)
        return functional.wait_tensor(everyone).index_select(0, self._order(mine.device))

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's [L,B,K,E+W] of the sum of every rank's [S,B,K,E+W]."""
        everyone = whole.new_zeros((self.most * len(self.runs), *whole.shape[1:]))
        everyone.index_copy_(0, self._order(whole.device), whole)
        mine = functional.reduce_scatter_single(everyone, "sum", 0, self.group)
        return functional.wait_tensor(mine)[: tokens_in(self.sight.runs)]

    def _padded(self, mine: Tensor) -> Tensor:
        return F.pad(mine, (0, 0, 0, 0, 0, 0, 0, self.most - mine.shape[0]))

    def _order(self, device: torch.device) -> Tensor:
        """[S]: where the token of each place lies among the ranks' padded messages."""
        places = [places_of(of_rank, device) for of_rank in self.runs]
        rows = [
            rank * self.most + torch.arange(len(of_rank), device=device)
            for rank, of_rank in enumerate(places)
        ]
        return torch.cat(rows)[torch.cat(places).argsort()]


def _attend(*inputs: Any) -> Tensor:
    return _Gather.apply(*inputs)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, backend: GatherAttention, rule: Rule
    ) -> Tensor:
        ctx.backend, ctx.rule = backend, rule
        online = OnlineForward(query.transpose(1, 2), value.shape[-1], backend.sight, rule)
        whole = backend.gather(pack(key, value))
        online.add(*heads_first(whole, key.shape[-1]), backend.keys)
        result = online.result.transpose(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, online.total)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, total = ctx.saved_tensors
        backend: GatherAttention = ctx.backend
        key_dim = key.shape[-1]
        grad, queries, results = (x.transpose(1, 2) for x in (grads[0], query, result))
        online = OnlineBackward(grad, queries, results, total, backend.sight, ctx.rule)
        whole = backend.gather(pack(key, value))
        found = torch.zeros_like(whole, dtype=total.dtype)
        online.add(*heads_first(whole, key_dim), backend.keys, *heads_first(found, key_dim))
        key_grad, value_grad = unpack(backend.scatter(found).to(key.dtype), key_dim)
        return online.query_grad.transpose(1, 2).to(query.dtype), key_grad, value_grad, None, None
