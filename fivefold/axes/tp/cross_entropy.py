"""Cross-entropy of a head whose rows are divided over the tensor axis: nobody holds all logits.

As `kernels.cross_entropy`, by chunks of tokens and with the gradients computed in forward. What
the softmax needs of the other ranks' part of the vocabulary are three numbers a token: the largest
logit, the sum of exponentials, and the target's logit.
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, T tensor-parallel ranks, C chunk
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels.cross_entropy import IGNORE
from fivefold.kernels.dispatch import low_precision_gemm_is_native


def vocabulary_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    start: int,
    group: dist.ProcessGroup,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int = 512,
) -> Tensor:
    """The loss SUM over targets, the same on each rank; see `linear_cross_entropy`.

    hidden [N,D] whole on each rank, weight [V/T,D] the rows from `start` on, labels [N]. The
    gradient of `hidden` is this rank's partial sum.
    """
    grad = torch.is_grad_enabled()
    head = _Head(start, group, softcap, z_loss, chunk)
    return _VocabularyCrossEntropy.apply(hidden, weight, labels, head, grad)


class _Head:
    """What does not change from chunk to chunk."""

    def __init__(
        self,
        start: int,
        group: dist.ProcessGroup,
        softcap: float | None,
        z_loss: float,
        chunk: int,
    ) -> None:
        self.start, self.group = start, group
        self.softcap, self.z_loss, self.chunk = softcap, z_loss, chunk

    def loss_and_slope(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The chunk's loss sum, and its gradient by this rank's logits [C,V/T]."""
        logits = (hidden @ weight.mT).to(wide)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        targets = labels != IGNORE
        rows = labels - self.start
        mine = targets & (rows >= 0) & (rows < weight.shape[0])
        place = rows.masked_fill(~mine, 0).unsqueeze(-1)
        largest = logits.amax(-1) if weight.shape[0] else logits.new_full(rows.shape, -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        exponentials = (logits - largest.unsqueeze(-1)).exp()
        sums = torch.stack((exponentials.sum(-1), self._at(logits, place, mine)))
        dist.all_reduce(sums, group=self.group)
        log_sum = sums[0].log() + largest
        loss = ((log_sum - sums[1] + self.z_loss * log_sum.square()) * targets).sum()
        factor = targets * (1.0 + 2.0 * self.z_loss * log_sum)
        slope = exponentials * (factor / sums[0]).unsqueeze(-1)
        if weight.shape[0]:
            slope.scatter_add_(-1, place, -mine.to(wide).unsqueeze(-1))
        if self.softcap is not None:
            slope = slope * (1.0 - (logits / self.softcap).square())
        return loss, slope

    def _at(self, logits: Tensor, place: Tensor, mine: Tensor) -> Tensor:
        if not logits.shape[-1]:
            return logits.new_zeros(mine.shape)
        return logits.gather(-1, place).squeeze(-1) * mine


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: _Head, grad: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        native = low_precision_gemm_is_native(hidden.device.type, hidden.dtype)
        factor = weight if native else weight.float()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if grad else None
        for start in range(0, hidden.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            operand = hidden[rows].to(factor.dtype)
            loss, slope = head.loss_and_slope(operand, factor, labels[rows], wide)
            total += loss
            if grad_hidden is not None and grad_weight is not None:
                slope = slope.to(factor.dtype)
                grad_hidden[rows] = slope @ factor
                grad_weight += slope.mT @ operand
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None
