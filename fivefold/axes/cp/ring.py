"""Ring attention (Liu et al. 2023): keys and values travel from rank to rank, queries stay.

At hop h a rank has the keys of the rank h before it, and passes them on while it computes. In
backward they travel again, and their gradients one hop behind them: each rank adds its part, and
the last sends them home. Nothing but this rank's own keys is kept in between.
"""

from __future__ import annotations

# B batch, L tokens of this rank, T tokens of another, H query heads, K key/value heads, E head_dim
# of queries and keys, W head_dim of values, R ranks
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.cp.block import Rule
from fivefold.axes.cp.eager import eager
from fivefold.axes.cp.message import heads_first, pack, unpack
from fivefold.axes.cp.online import OnlineBackward, OnlineForward
from fivefold.axes.cp.sight import Sight
from fivefold.axes.cp.split import Run, tokens_in

KEYS, GRADIENTS = 0, 1  # tags: both are on their way between two ranks at the same time


class Ring:
    """This rank's place among ranks that each pass to the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def source(self, hop: int) -> int:
        """Whose keys are here at `hop`."""
        return (self.rank - hop) % self.size

    def pass_on(self, leaving: Tensor, arriving: Tensor, tag: int) -> Passage:
        """Begin to send `leaving` to the next rank and to fill `arriving` from the previous."""
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, leaving, self._next, self.group, tag),
            dist.P2POp(dist.irecv, arriving, self._previous, self.group, tag),
        ])  # fmt: skip
        return Passage(works, leaving, arriving)


class Passage:
    """A message on its way, and one that comes."""

    def __init__(self, works: list[dist.Work], leaving: Tensor, arriving: Tensor) -> None:
        self._works, self._leaving, self._arriving = works, leaving, arriving

    def wait(self) -> Tensor:
        """What arrived; what was sent may be changed from now on."""
        for work in self._works:
            work.wait()
        return self._arriving


class RingAttention:
    """An attention backend for rows divided over the ranks of `group`.

    sight: of this rank's queries. runs: the places that each rank of the group holds.
    """

    def __init__(
        self, group: dist.ProcessGroup, sight: Sight, runs: Sequence[tuple[Run, ...]]
    ) -> None:
        self.ring = Ring(group)
        self.sight = sight
        self.runs = tuple(runs)
        self._attend = eager(_attend)  # the compiler does not trace sends

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


def _attend(*inputs: Any) -> Tensor:
    return _Ring.apply(*inputs)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, backend: RingAttention, rule: Rule
    ) -> Tensor:
        ctx.backend, ctx.rule = backend, rule
        online = OnlineForward(query.transpose(1, 2), value.shape[-1], backend.sight, rule)
        here = pack(key, value)
        for hop in range(backend.ring.size):
            passage = _next_keys(backend, here, hop)
            online.add(*heads_first(here, key.shape[-1]), backend.runs[backend.ring.source(hop)])
            here = passage.wait() if passage else here
        result = online.result.transpose(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, online.total)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, total = ctx.saved_tensors
        backend: RingAttention = ctx.backend
        ring, key_dim = backend.ring, key.shape[-1]
        grad, queries, results = (x.transpose(1, 2) for x in (grads[0], query, result))
        online = OnlineBackward(grad, queries, results, total, backend.sight, ctx.rule)
        here = pack(key, value)
        gradient_passage: Passage | None = None
        for hop in range(ring.size):
            key_passage = _next_keys(backend, here, hop)
            mine = torch.zeros_like(here, dtype=total.dtype)
            online.add(
                *heads_first(here, key_dim),
                backend.runs[ring.source(hop)],
                *heads_first(mine, key_dim),
            )
            if hop == 0:
                home = mine  # joins what comes back at the end, so starts no journey
            else:
                if gradient_passage:
                    mine += gradient_passage.wait()
                gradient_passage = ring.pass_on(mine, _room(backend, mine, hop + 1), GRADIENTS)
            here = key_passage.wait() if key_passage else here
        if gradient_passage:
            home += gradient_passage.wait()
        key_grad, value_grad = unpack(home.to(key.dtype), key_dim)
        query_grad = online.query_grad.transpose(1, 2).to(query.dtype)
        return query_grad, key_grad, value_grad, None, None


def _next_keys(backend: RingAttention, here: Tensor, hop: int) -> Passage | None:
    """Pass keys on, except in the last hop, when all have seen them."""
    if hop == backend.ring.size - 1:
        return None
    return backend.ring.pass_on(here, _room(backend, here, hop + 1), KEYS)


def _room(backend: RingAttention, like: Tensor, hop: int) -> Tensor:
    """Where the message of the rank whose keys are here at `hop` goes."""
    tokens = tokens_in(backend.runs[backend.ring.source(hop)])
    return like.new_empty((tokens, *like.shape[1:]))
