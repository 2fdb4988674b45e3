"""Ulysses (Jacobs et al. 2023): tokens of all heads become all tokens of some heads, and back.

One all-to-all carries queries, keys and values in, one carries the result out; in between runs
any attention backend. Where key heads do not divide over the ranks, each is sent to all ranks
whose query heads read it: repeated before the exchange, so that autograd adds up its gradients.
"""

from __future__ import annotations

# B batch, L tokens of this rank, S tokens of all U ranks, H query heads, K key/value heads,
# E head_dim of queries and keys, W head_dim of values, F features of one rank's heads
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from fivefold.axes.cp.split import Run, places_of, tokens_in
from fivefold.model.attention_backend import AttentionBackend


class UlyssesAttention:
    """An attention backend around `inner`, which sees all tokens of the group in their order.

    runs: the places that each rank of the group holds. rank: which of them this is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        inner: AttentionBackend,
        runs: Sequence[tuple[Run, ...]],
        rank: int,
    ) -> None:
        self.group = group
        self.inner = inner
        self.runs = tuple(runs)
        self.rank = rank
        self.tokens = tuple(tokens_in(of_rank) for of_rank in runs)

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
        ways, value_dim = len(self.runs), value.shape[-1]
        copies = ways // math.gcd(key.shape[2], ways)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
        parts = [x.unflatten(2, (ways, -1)) for x in (query, key, value)]
        shapes = [part.shape[3:] for part in parts]
        features = torch.cat([part.flatten(3) for part in parts], dim=-1)
        mixed = self._to_heads(features).split([shape.numel() for shape in shapes], dim=-1)
        attended = self.inner(
            *(x.unflatten(-1, shape) for x, shape in zip(mixed, shapes, strict=True)),
            layer=layer,
            window=window,
            scale=scale,
            softcap=softcap,
        )
        return self._to_tokens(attended.flatten(2)).unflatten(-1, (-1, value_dim)).flatten(2, 3)

    def _to_heads(self, features: Tensor) -> Tensor:
        """[B,L,U,F] of this rank's tokens to [B,S,F] of this rank's heads, in order of places."""
        length, ways = features.shape[1:3]
        leaving = features.permute(2, 1, 0, 3).flatten(0, 1)  # [U * L,B,F]
        arrived = _Exchange.apply(leaving, [length] * ways, list(self.tokens), self.group)
        return arrived.index_select(0, self._order(features.device)).transpose(0, 1)

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[B,S,F] of this rank's heads to [B,L,U,F] of this rank's tokens."""
        back = self._order(attended.device).argsort()
        leaving = attended.transpose(0, 1).index_select(0, back)
        length, ways = self.tokens[self.rank], len(self.runs)
        arrived = _Exchange.apply(leaving, list(self.tokens), [length] * ways, self.group)
        return arrived.unflatten(0, (ways, length)).permute(2, 1, 0, 3)

    def _order(self, device: torch.device) -> Tensor:
        """[S]: which of the tokens, as they arrive rank by rank, comes at each place."""
        return torch.cat([places_of(of_rank, device) for of_rank in self.runs]).argsort()


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradients go the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        return _all_to_all(rows, leaving, arriving, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.arriving, ctx.leaving, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, leaving: list[int], arriving: list[int], group: dist.ProcessGroup
) -> Tensor:
    found = functional.all_to_all_single(rows.contiguous(), arriving, leaving, group)
    return functional.wait_tensor(found)
