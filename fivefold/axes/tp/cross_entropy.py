"""Cross-entropy of a head whose rows are divided over the tensor axis: nobody holds all logits.

As `kernels.cross_entropy`, by chunks of tokens and with the gradients computed in forward. The ranks
meet twice in a chunk: for the largest logit, then for the sums of exponentials and the targets'.
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, T tensor-parallel ranks, C chunk
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels.head import (
    IGNORE,
    HeadProducts,
    Wants,
    check,
    results,
    scaled,
    weight_gradient,
    wide,
)
from fivefold.kernels.head_part import (
    CHOSEN,
    LARGEST,
    SUM,
    head_part_gradients_,
    head_part_sums_,
)


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
    gradient of `hidden` is this rank's partial sum. Raises `KernelError` for other shapes.
    """
    check(hidden, weight, labels, chunk)
    wants = torch.is_grad_enabled()
    head = _DividedHead(start, group, softcap, z_loss, chunk, Wants(wants, wants))
    return _VocabularyCrossEntropy.apply(hidden, weight, labels, head)


class _DividedHead:
    """What does not change from chunk to chunk."""

    def __init__(
        self,
        start: int,
        group: dist.ProcessGroup,
        softcap: float | None,
        z_loss: float,
        chunk: int,
        wants: Wants,
    ) -> None:
        self.start, self.group, self.wants = start, group, wants
        self.softcap, self.z_loss, self.chunk = softcap, z_loss, chunk

    def own(self, labels: Tensor, words: int) -> Tensor:
        """Labels counted from this rank's first word; -100 where another rank has it, or nobody."""
        rows = labels - self.start
        return torch.where((labels != IGNORE) & (rows >= 0) & (rows < words), rows, IGNORE)

    def together(self, parts: Tensor) -> Tensor:
        """The three numbers [3,C] over all words from those of each rank's."""
        largest = parts[LARGEST].clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        sums = parts[SUM] * (parts[LARGEST] - largest).exp()
        summed = torch.stack((sums, parts[CHOSEN]))
        dist.all_reduce(summed, group=self.group)
        return torch.cat((largest.unsqueeze(0), summed))

    def loss_and_rise(self, everywhere: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss sum of a chunk, and its slope by each token's log of the sum [C]."""
        above = everywhere[SUM].log()
        normaliser = above + everywhere[LARGEST]
        # From the largest logit on: the difference of two large numbers would round.
        losses = above - (everywhere[CHOSEN] - everywhere[LARGEST])
        losses = losses + self.z_loss * normaliser.square()
        targets = labels != IGNORE
        rise = 1.0 + 2.0 * self.z_loss * normaliser
        # 0 says that there is no target: a target's slope that happens to be 0 is next to it.
        rise = torch.where(rise == 0, torch.finfo(rise.dtype).tiny, rise)
        return torch.where(targets, losses, 0).sum(), torch.where(targets, rise, 0)


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: _DividedHead
    ) -> Tensor:
        grad_hidden, sums, room = results(hidden, weight, head.chunk, head.wants)
        sums.zero_()
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        factor = HeadProducts.of(hidden, weight).weight  # converted once, if it must be
        for start in range(0, hidden.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            operands = hidden[rows], factor, head.own(labels[rows], weight.shape[0]), head.softcap
            size = operands[0].shape[0], weight.shape[0]
            logits = room[: size[0] * size[1]].view(size)
            everywhere = head.together(head_part_sums_(*operands, logits))
            loss, rise = head.loss_and_rise(everywhere, labels[rows])
            total += loss
            if head.wants.any:
                head_part_gradients_(*operands, logits, everywhere, rise, grad_hidden[rows], sums)
        kept = weight_gradient(weight, sums, room) if head.wants.any else sums
        if kept is not sums:
            kept.copy_(sums)
        ctx.save_for_backward(grad_hidden, kept)
        return total.to(wide(hidden))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return scaled(grad_hidden, grads[0]), scaled(grad_weight, grads[0]), None, None
