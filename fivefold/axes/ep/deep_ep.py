"""Tokens to experts by DeepEP's kernels (DeepSeek-AI 2025) in place of plain all-to-all.

A token goes to each rank once, however many of its experts are there, and ranks add up its
answers before they travel back: on H800 clusters that is what makes dispatch keep up. Written
against the `Buffer` of DeepEP 1, which takes bf16 on GPUs alone; tested here with a stand-in.
"""

from __future__ import annotations

# N tokens, D hidden, K experts a token, M tokens that arrive here
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.ep.dispatch import check_experts
from fivefold.core.errors import MissingExtraError
from fivefold.model.dispatch import LocalDispatch, RunExperts


class DeepEPDispatch:
    """An ExpertDispatcher over the ranks of `group`.

    Raises MissingExtraError where the package `deep_ep` is not installed.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        try:
            self._library: Any = import_module("deep_ep")
        except ImportError:
            raise MissingExtraError(
                "deep_ep", "", "expert dispatch by DeepEP",
                "build it as github.com/deepseek-ai/DeepEP says, or use plain all-to-all",
            ) from None  # fmt: skip
        self.group = group
        self.experts = experts
        ranks = dist.get_world_size(group)
        check_experts(experts, ranks)
        # What did not come for an expert here has number -1, which is that of a dropped choice.
        self._here = LocalDispatch(experts // ranks)
        self._buffer: Any = None

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
        if self._buffer is None:
            self._buffer = self._make_buffer(hidden.shape[1] * max(2, hidden.element_size()))
        trip = _Trip(self._buffer, self.experts)
        rows, weights, numbers = _Dispatch.apply(hidden, weight, choice, trip)
        return _Combine.apply(self._here(rows, numbers, weights, run, dropless=False), trip)

    def _make_buffer(self, row_bytes: int) -> Any:
        kind, ranks = self._library.Buffer, dist.get_world_size(self.group)
        configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
        near = max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs)
        far = max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs)
        return kind(self.group, near, far)


class _Trip:
    """There and back of one batch; `handle` is the library's record of who sent what."""

    def __init__(self, buffer: Any, experts: int) -> None:
        self.buffer = buffer
        self.experts = experts
        self.handle: Any = None


class _Dispatch(torch.autograd.Function):
    """[N,D], [N,K], [N,K] to what arrives: rows [M,D], weights [M,K], local experts or -1 [M,K]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, choice: Tensor, trip: _Trip
    ) -> tuple[Tensor, ...]:
        buffer = trip.buffer
        per_rank, per_node, per_expert, is_in, _ = buffer.get_dispatch_layout(choice, trip.experts)
        rows, numbers, weights, _, trip.handle, _ = buffer.dispatch(
            hidden,
            topk_idx=choice,
            topk_weights=weight,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert,
        )
        ctx.trip = trip
        ctx.mark_non_differentiable(numbers)
        return rows, weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        hidden, weight, _ = trip.buffer.combine(
            grads[0].contiguous(), trip.handle, topk_weights=grads[1].contiguous()
        )
        return hidden, weight, None, None


class _Combine(torch.autograd.Function):
    """Answers [M,D] back to their tokens, summed: [N,D]."""

    @staticmethod
    def forward(ctx: Any, answers: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.buffer.combine(answers.contiguous(), trip.handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *_ = ctx.trip.buffer.dispatch(grads[0].contiguous(), handle=ctx.trip.handle)
        return rows, None
