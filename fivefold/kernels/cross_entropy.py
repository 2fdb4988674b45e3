"""Cross-entropy of a linear head, by chunks of tokens: the logits of all tokens never exist.

The gradient with respect to the logits is (softmax - onehot), known as soon as the loss is. So the
forward pass of a chunk also computes its share of the gradients, in the chunk's own logits buffer,
and backward only scales them (the idea of Liger Kernel, Hsu et al. 2024).
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, C chunk
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.dispatch import low_precision_gemm_is_native

IGNORE = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int = 512,
) -> Tensor:
    """Sum over targets of -log softmax(hidden @ weight.T)[label] + z_loss * logsumexp^2; fp32.

    hidden [N,D], weight [V,D], labels [N] with -100 where there is no target. `softcap` c turns
    logits into c tanh(logits / c) first (Gemma 2). At most `chunk` rows of logits exist at a time.
    """
    grad = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden, weight, labels, softcap, z_loss, chunk, grad)[0]


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """The same over the whole logits [N,V], by ordinary differentiable operators."""
    logits = _wide(hidden) @ _wide(weight).mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    squares = logits.logsumexp(-1).square() * (labels != IGNORE)
    return loss + z_loss * squares.sum()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        softcap: float | None,
        z_loss: float,
        chunk: int,
        grad: bool,
    ) -> tuple[Tensor]:
        wants_hidden = grad and ctx.needs_input_grad[0]
        wants_weight = grad and ctx.needs_input_grad[1]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Operands of the GEMMs: fp32 copies where the low format has no GEMM of its own here.
        native = low_precision_gemm_is_native(hidden.device.type, hidden.dtype)
        factor = weight if native else weight.float()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            operand = hidden[rows].to(factor.dtype)
            loss, slope = _chunk(operand, factor, labels[rows], softcap, z_loss, wide)
            total += loss
            slope = slope.to(factor.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ factor
            if grad_weight is not None:
                _add_product(grad_weight, slope, operand)
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return (total,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else grad_weight * scale,
            *(None,) * 5,
        )


def _add_product(total: Tensor, slope: Tensor, operand: Tensor) -> None:
    """total [V,D] += slope [C,V] transposed times operand [C,D]."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.mT, operand)
    else:
        total += slope.mT @ operand


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    z_loss: float,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Loss sum of C tokens and its slope [C,V] with respect to the raw logits."""
    logits = (hidden @ weight.mT).to(wide)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    target = labels != IGNORE
    index = torch.where(target, labels, 0).unsqueeze(-1)
    normaliser = logits.logsumexp(-1)
    losses = normaliser - logits.gather(-1, index).squeeze(-1) + z_loss * normaliser.square()
    loss = torch.where(target, losses, 0).sum()
    bend = None if softcap is None else 1 - (logits / softcap).square()
    slope = logits.sub_(normaliser.unsqueeze(-1)).exp_()
    slope.mul_((1 + 2 * z_loss * normaliser).unsqueeze(-1))
    slope.scatter_add_(-1, index, torch.full_like(index, -1, dtype=wide))
    slope.mul_(target.unsqueeze(-1))
    return loss, slope if bend is None else slope.mul_(bend)
