"""Log-probabilities and entropies of a linear head, by chunks: what alignment's losses are made of.

Their losses come after these numbers, so the slopes are not known in forward: backward computes the
logits of each chunk again. Nothing but the operands is kept.
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, C chunk
from typing import Any

import torch
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import cross_entropy as native
from fivefold.kernels.head import (
    IGNORE,
    ChunkedHead,
    Wants,
    check,
    results,
    weight_gradient,
    wide,
)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    chunk: int = 512,
) -> tuple[Tensor, Tensor]:
    """(log softmax(hidden @ weight.T)[label] [N], entropy of that softmax [N]), fp32.

    hidden [N,D], weight [V,D], labels [N]; where a label is -100 both are 0 and without gradient.
    `softcap` and `chunk` as in `linear_cross_entropy`. Raises `KernelError` as that does.
    """
    found, entropies, _ = _linear_log_probs(hidden, weight, labels, softcap, chunk)
    return found, entropies


def linear_log_probs_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same over the whole logits [N,V], by ordinary differentiable operators."""
    logits = hidden.to(wide(hidden)) @ weight.to(wide(hidden)).mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logs = logits.log_softmax(-1)
    target = labels != IGNORE
    index = torch.where(target, labels, 0).unsqueeze(-1)
    found = logs.gather(-1, index).squeeze(-1)
    return found * target, -(logs.exp() * logs).sum(-1) * target


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, chunk: int
) -> tuple[Tensor, ...]:
    """(log-probabilities, entropies, room)."""
    check(hidden, weight, labels, chunk)
    made = results(hidden, weight, chunk, Wants(False, False))
    head = ChunkedHead(hidden, weight, chunk, Wants(False, False), made)
    found, entropies = (made[2].new_empty(hidden.shape[0]) for _ in range(2))
    for rows in head.chunks():
        found[rows], entropies[rows] = _log_probs_(head.logits(rows), labels[rows], softcap)
    return found, entropies, made[2]


def _backward(
    of_log_probs: Tensor,
    of_entropies: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, ...]:
    """(gradient of hidden, sums, room) as `head.results`: where the weight's gradient is."""
    wants = Wants(wants_hidden, wants_weight)
    made = results(hidden, weight, chunk, wants)
    head = ChunkedHead(hidden, weight, chunk, wants, made)
    for rows in head.chunks():
        grads = of_log_probs[rows], of_entropies[rows]
        slope = _slopes_(head.logits(rows), labels[rows], softcap, grads, head.format)
        head.add(rows, slope)
    head.finish()
    return made


def _log_probs_(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Both numbers of C tokens; their raw logits [C,V] are lost."""
    match dispatch.choose("cross_entropy", logits.device.type, logits.dtype).implementation:
        case "native":
            return native.log_probs_(logits, labels, softcap)
        case "triton":
            from fivefold.kernels.triton import cross_entropy as gpu

            found, entropies = gpu.log_probs(logits, labels, softcap or 0.0)
            return found, torch.where(labels != IGNORE, entropies, 0)
    logs, _ = _logs_(logits, softcap)
    target = labels != IGNORE
    index = torch.where(target, labels, 0).unsqueeze(-1)
    found = torch.where(target, logs.gather(-1, index).squeeze(-1), 0)
    return found, torch.where(target, _entropies(logs), 0)


def _slopes_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """In place of C tokens' raw logits [C,V], the slopes of a loss with `grads` by both numbers."""
    if dispatch.is_native("cross_entropy", logits.device.type, logits.dtype):
        return native.log_probs_slope_(logits, labels, softcap, grads, dtype)
    of_log_probs, of_entropies = (g.unsqueeze(-1) for g in grads)
    logs, bend = _logs_(logits, softcap)
    target = (labels != IGNORE).unsqueeze(-1)
    index = torch.where(target, labels.unsqueeze(-1), 0)
    entropies = _entropies(logs).unsqueeze(-1)
    pull = logs.exp() * (of_log_probs + of_entropies * (logs.clamp_min(LEAST_LOG) + entropies))
    slope = pull.neg_().scatter_add_(-1, index, of_log_probs)
    slope.masked_fill_(~target, 0)
    return (slope if bend is None else slope.mul_(bend)).to(dtype)


# A probability of 0 adds nothing to an entropy: 0 times this is 0, where 0 times -inf is NaN.
LEAST_LOG = -1e4


def _logs_(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Log-softmax, and how much of a slope by capped logits arrives at the raw ones."""
    bend = None
    if softcap is not None:
        bend = 1 - logits.div_(softcap).tanh_().square()
        logits.mul_(softcap)
    return logits.log_softmax(-1), bend


def _entropies(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs.clamp_min(LEAST_LOG)).sum(-1)


def _shapes(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, chunk: int
) -> tuple[Tensor, ...]:
    room = results(hidden, weight, chunk, Wants(False, False))[2]
    return *(room.new_empty(hidden.shape[0]) for _ in range(2)), room


def _shapes_backward(
    of_log_probs: Tensor,
    of_entropies: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, ...]:
    return results(hidden, weight, chunk, Wants(wants_hidden, wants_weight))


_linear_log_probs = operator.define(
    "linear_log_probs(Tensor hidden, Tensor weight, Tensor labels, float? softcap, int chunk)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _shapes,
)
_linear_log_probs_backward = operator.define(
    "linear_log_probs_backward(Tensor of_log_probs, Tensor of_entropies, Tensor hidden,"
    " Tensor weight, Tensor labels, float? softcap, int chunk, bool wants_hidden,"
    " bool wants_weight) -> (Tensor, Tensor, Tensor)",
    _backward,
    _shapes_backward,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, ctx.softcap, ctx.chunk = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels)


def _differentiate(
    ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    hidden, weight, labels = ctx.saved_tensors
    wants = ctx.needs_input_grad[:2]
    given = of_log_probs if of_log_probs is not None else of_entropies
    if given is None:
        return (None,) * 5
    zeros = torch.zeros_like(given)
    grad_hidden, sums, room = _linear_log_probs_backward(
        zeros if of_log_probs is None else of_log_probs,
        zeros if of_entropies is None else of_entropies,
        hidden, weight, labels, ctx.softcap, ctx.chunk, *wants,
    )  # fmt: skip
    return (
        grad_hidden if wants[0] else None,
        weight_gradient(weight, sums, room) if wants[1] else None,
        None, None, None,
    )  # fmt: skip


operator.differentiate("linear_log_probs", _differentiate, _keep)
