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

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import cross_entropy as native
from fivefold.kernels.head import (
    IGNORE,
    ChunkedHead,
    Wants,
    check,
    results,
    scaled,
    weight_gradient,
    wide,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int = 512,
) -> Tensor:
    """Sum over targets of -log softmax(hidden @ weight.T)[label] + z_loss * logsumexp^2; fp32.

    hidden [N,D], weight [V,D], labels [N] with -100 where there is no target. `softcap` c turns
    logits into c tanh(logits / c) first (Gemma 2). Of each target, `label_smoothing` goes to all
    words alike. At most `chunk` rows of logits exist at a time. Raises `KernelError` for other
    shapes, and for labels beyond the vocabulary where the kernels are native.
    """
    grad = torch.is_grad_enabled()
    return _linear_cross_entropy(
        hidden, weight, labels, softcap, z_loss, label_smoothing, chunk,
        grad and hidden.requires_grad, grad and weight.requires_grad,
    )[0]  # fmt: skip


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The same over the whole logits [N,V], by ordinary differentiable operators."""
    logits = hidden.to(wide(hidden)) @ weight.to(wide(hidden)).mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing
    )
    squares = logits.logsumexp(-1).square() * (labels != IGNORE)
    return loss + z_loss * squares.sum()


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, ...]:
    """(loss, gradient of hidden, sums, room) as `head.results`: where the weight's gradient is."""
    check(hidden, weight, labels, chunk)
    wants = Wants(wants_hidden, wants_weight)
    made = results(hidden, weight, chunk, wants)
    head = ChunkedHead(hidden, weight, chunk, wants, made)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows in head.chunks():
        logits, slope_format = head.logits(rows), head.format if wants.any else None
        losses, slope = _slopes_(
            logits, labels[rows], softcap, z_loss, label_smoothing, slope_format
        )
        total += losses.sum(dtype=torch.float64)
        if wants.any:
            head.add(rows, slope)
    head.finish()
    return total.to(wide(hidden)), *made


def _slopes_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Losses of C tokens and, in place of their raw logits [C,V], the slopes of them in `dtype`."""
    match dispatch.choose("cross_entropy", logits.device.type, logits.dtype).implementation:
        case "native":
            return native.cross_entropy_slope_(
                logits, labels, softcap, z_loss, label_smoothing, dtype
            )
        case "triton" if dtype is not None:
            from fivefold.kernels.triton import cross_entropy as gpu

            losses = gpu.cross_entropy_slope_(
                logits, labels, softcap or 0.0, z_loss, label_smoothing
            )
            return losses, logits.to(dtype)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    target = labels != IGNORE
    index = torch.where(target, labels, 0).unsqueeze(-1)
    normaliser = logits.logsumexp(-1)
    losses = normaliser - logits.gather(-1, index).squeeze(-1)
    if label_smoothing:
        losses = torch.lerp(losses, normaliser - logits.mean(-1), label_smoothing)
    losses = torch.where(target, losses + z_loss * normaliser.square(), 0)
    if dtype is None:
        return losses, logits
    bend = None if softcap is None else 1 - (logits / softcap).square()
    slope = logits.sub_(normaliser.unsqueeze(-1)).exp_()
    slope.mul_((1 + 2 * z_loss * normaliser).unsqueeze(-1)).sub_(label_smoothing / slope.shape[1])
    slope.scatter_add_(-1, index, torch.full_like(index, label_smoothing - 1, dtype=slope.dtype))
    slope.masked_fill_(~target.unsqueeze(-1), 0)
    return losses, (slope if bend is None else slope.mul_(bend)).to(dtype)


def _shapes(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, ...]:
    made = results(hidden, weight, chunk, Wants(wants_hidden, wants_weight))
    return hidden.new_empty((), dtype=wide(hidden)), *made


_linear_cross_entropy = operator.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, float? softcap, float z_loss,"
    " float label_smoothing, int chunk, bool wants_hidden, bool wants_weight)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _shapes,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad_hidden, sums, room = output
    *_, ctx.wants_hidden, ctx.wants_weight = inputs
    ctx.mark_non_differentiable(grad_hidden, sums, room)
    ctx.set_materialize_grads(False)  # of what nobody differentiates, as large as the weight
    kept = weight_gradient(inputs[1], sums, room) if ctx.wants_weight else sums
    ctx.save_for_backward(grad_hidden, kept)


def _differentiate(ctx: Any, scale: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight = ctx.saved_tensors
    rest = (None,) * 7
    if scale is None:
        return None, None, *rest
    return (
        scaled(grad_hidden, scale) if ctx.wants_hidden else None,
        scaled(grad_weight, scale) if ctx.wants_weight else None,
        *rest,
    )


operator.differentiate("linear_cross_entropy", _differentiate, _keep)
