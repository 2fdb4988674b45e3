"""AdamW (Loshchilov and Hutter 2019) over flat tensors: one pass, each number read and written once."""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# P parameters
import math

from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.language import check, on_device_of, tl, triton

NUMBERS_A_PROGRAM = 1024


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step of decoupled AdamW in place, as torch.optim.AdamW; `step` counts from 1.

    `parameter`, `first` and `second` moment are flat fp32 [P], `gradient` [P] of any format. `copy`
    [P], where given, gets the new parameter rounded to its format.
    """
    given = [parameter, gradient, first, second] + ([] if copy is None else [copy])
    check("adamw_", *given)
    if any(not t.is_contiguous() or t.shape != parameter.shape for t in given):
        raise FivefoldError("adamw_ takes flat tensors of one size", "flatten them")
    count = parameter.numel()
    if not count:
        return
    # Corrections of the moments' bias towards zero, in double precision on the host.
    rate = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    with on_device_of(parameter):
        adamw_kernel[(triton.cdiv(count, NUMBERS_A_PROGRAM),)](
            parameter, gradient, first, second, copy, count,
            rate, root, 1 - lr * weight_decay, beta2, 1 - beta1, 1 - beta2, eps,
            BLOCK=NUMBERS_A_PROGRAM,
        )  # fmt: skip


@triton.jit
def adamw_kernel(
    parameter: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    copy: tl.tensor,
    count: tl.tensor,
    rate: tl.tensor,
    root: tl.tensor,
    keep: tl.tensor,
    beta2: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """`rest` is 1 - beta, `keep` 1 - lr * decay, `rate` and `root` hold the bias corrections."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(first + at, mask=inside, other=0.0)
    square = tl.load(second + at, mask=inside, other=0.0)
    mean += (grad - mean) * rest1
    square = square * beta2 + grad * grad * rest2
    # The exactly rounded root and quotient: the fast ones differ from the CPU's in the last bits.
    step = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root + tl.zeros_like(square)) + eps)
    moved = tl.load(parameter + at, mask=inside, other=0.0) * keep - rate * step
    tl.store(first + at, mean, mask=inside)
    tl.store(second + at, square, mask=inside)
    tl.store(parameter + at, moved, mask=inside)
    if copy is not None:
        tl.store(copy + at, moved.to(copy.dtype.element_ty), mask=inside)
