"""A chunk of a head whose words are divided over ranks: what each does before and after they meet.

Of the other ranks' words a softmax needs three numbers a token: the largest logit, the sum of
exponentials and the target's logit. `head_part_sums_` gives a rank's own; with everybody's,
`head_part_gradients_` turns its logits into slopes and takes their share of the gradients.
"""

from __future__ import annotations

# C tokens of a chunk, D hidden, V words of this rank
import torch
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import cross_entropy as native
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.head import IGNORE, HeadProducts, check

LARGEST, SUM, CHOSEN = range(3)


def head_part_sums_(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, logits: Tensor
) -> Tensor:
    """[3,C] wide: the largest logit, the sum of exponentials from it on, the target's logit or 0.

    hidden [C,D], weight [V,D], labels [C] among these words or -100. The logits, capped, are left
    in `logits` [C,V].
    """
    return _sums(hidden, weight, labels, softcap, logits)


def head_part_gradients_(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    logits: Tensor,
    everywhere: Tensor,
    rise: Tensor,
    grad_hidden: Tensor,
    sums: Tensor,
) -> None:
    """Slopes `rise * softmax - (is label)` from the logits, which are lost, and what they give.

    everywhere: `head_part_sums_` over all ranks' words. rise [C]: the slope of a token's loss by
    the log of its sum, 0 where it has no target on any rank. Into `grad_hidden` [C,D] goes this
    rank's part, and to `sums` [V,D] the gradient of the weight is added.
    """
    _gradients(
        hidden, weight, labels, softcap, logits, everywhere, rise, grad_hidden, sums
    )  # fmt: skip


def _compute_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, logits: Tensor
) -> Tensor:
    _check(hidden, weight, labels, logits)
    HeadProducts.of(hidden, weight).logits(hidden, logits)
    match dispatch.choose("cross_entropy", logits.device.type, logits.dtype).implementation:
        case "native":
            return native.part_sums_(logits, labels, softcap)
        case "triton":
            from fivefold.kernels.triton import head_part as gpu

            return gpu.part_sums_(logits, labels, softcap or 0.0)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if not logits.shape[1]:
        return _of_no_words(logits)
    largest = logits.amax(-1).clamp_min_(torch.finfo(logits.dtype).min)  # of words all ruled out
    exponentials = (logits - largest.unsqueeze(-1)).exp_()
    here = labels != IGNORE
    chosen = logits.gather(-1, torch.where(here, labels, 0).unsqueeze(-1)).squeeze(-1)
    return torch.stack((largest, exponentials.sum(-1), torch.where(here, chosen, 0)))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, logits: Tensor) -> None:
    check(hidden, weight, labels, 1)
    if logits.shape != (hidden.shape[0], weight.shape[0]) or not logits.is_contiguous():
        raise KernelError(
            f"logits are dense [{hidden.shape[0]}, {weight.shape[0]}], not {list(logits.shape)}"
        )


def _of_no_words(logits: Tensor) -> Tensor:
    found = logits.new_zeros(3, logits.shape[0])
    found[LARGEST] = torch.finfo(logits.dtype).min
    return found


def _compute_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    logits: Tensor,
    everywhere: Tensor,
    rise: Tensor,
    grad_hidden: Tensor,
    sums: Tensor,
) -> None:
    _check(hidden, weight, labels, logits)
    tokens, wide = hidden.shape[0], logits.dtype
    fits = everywhere.shape == (3, tokens) and rise.shape == (tokens,)
    if not fits or everywhere.dtype != wide or rise.dtype != wide:
        raise KernelError(
            f"{tokens} tokens have sums [3,{tokens}] and slopes [{tokens}] in {wide}, not "
            f"{list(everywhere.shape)} {everywhere.dtype} and {list(rise.shape)} {rise.dtype}"
        )
    if grad_hidden.shape != hidden.shape or sums.shape != weight.shape:
        raise KernelError(
            f"gradients are {list(hidden.shape)} and {list(weight.shape)}, not "
            f"{list(grad_hidden.shape)} and {list(sums.shape)}"
        )
    products = HeadProducts.of(hidden, weight)
    largest, total = everywhere[LARGEST], everywhere[SUM]
    match dispatch.choose("cross_entropy", logits.device.type, logits.dtype).implementation:
        case "native":
            slope = native.part_slopes_(
                logits, labels, softcap, largest, total, rise, products.format
            )
        case "triton":
            from fivefold.kernels.triton import head_part as gpu

            gpu.part_slopes_(logits, labels, softcap or 0.0, largest, total, rise)
            slope = logits.to(products.format)
        case _:
            slope = _slopes_(logits, labels, softcap, largest, total, rise).to(products.format)
    products.hidden_gradient(slope, grad_hidden)
    products.add_weight_gradient(slope, hidden, sums)


def _slopes_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    largest: Tensor,
    total: Tensor,
    rise: Tensor,
) -> Tensor:
    bend = None if softcap is None else 1 - (logits / softcap).square()
    slope = logits.sub_(largest.unsqueeze(-1)).exp_().mul_((rise / total).unsqueeze(-1))
    here = labels != IGNORE
    if slope.shape[1]:
        index = torch.where(here, labels, 0).unsqueeze(-1)
        slope.scatter_add_(-1, index, -here.to(slope.dtype).unsqueeze(-1))
    slope.masked_fill_((rise == 0).unsqueeze(-1), 0)
    return slope if bend is None else slope.mul_(bend)


_sums = operator.define(
    "head_part_sums_(Tensor hidden, Tensor weight, Tensor labels, float? softcap, Tensor(a!) logits)"
    " -> Tensor",
    _compute_sums,
    lambda hidden, weight, labels, softcap, logits: logits.new_empty(3, logits.shape[0]),
)
_gradients = operator.define(
    "head_part_gradients_(Tensor hidden, Tensor weight, Tensor labels, float? softcap,"
    " Tensor(a!) logits, Tensor everywhere, Tensor rise, Tensor(b!) grad_hidden, Tensor(c!) sums)"
    " -> ()",
    _compute_gradients,
    lambda *_: None,
)
