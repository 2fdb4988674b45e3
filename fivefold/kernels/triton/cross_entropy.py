"""Cross-entropy over rows of logits, whose gradient takes their place (Liger Kernel, Hsu et al. 2024).

A program owns a row and walks its vocabulary in blocks, twice: once for the log-sum-exp (online, as
in online_softmax.py), once for what follows from it. A row of 150,000 logits stays in the L2 cache
between the two.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# C rows, V vocabulary
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.kernels.triton.gated import tanh
from fivefold.kernels.triton.language import check, on_device_of, tl, triton

IGNORE = tl.constexpr(-100)
BLOCK = 4096
WARPS = 8


def cross_entropy_slope_(
    logits: Tensor, labels: Tensor, softcap: float, z_loss: float, label_smoothing: float
) -> Tensor:
    """Losses [C] fp32 of raw logits [C,V], which are overwritten by d loss / d logits.

    loss = lse - (1 - s) z[label] - s mean(z) + z_loss lse^2, where z = c tanh(logits / c) under
    `softcap` c (0: none), lse is the log-sum-exp of z and s the smoothing. Label -100: no loss, no
    slope. A label outside the vocabulary makes its loss NaN rather than read what is not there.
    """
    check("cross_entropy_slope_", logits)
    check_rows(logits, labels)
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.numel():
        with on_device_of(logits):
            slope_kernel[(logits.shape[0],)](
                logits, labels.contiguous(), losses, logits.stride(0), logits.shape[1],
                float(z_loss), float(label_smoothing), SOFTCAP=softcap, BLOCK=BLOCK,
                num_warps=WARPS,
            )  # fmt: skip
    return losses


def log_probs(logits: Tensor, labels: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy of the row's distribution in nats), [C] fp32 each.

    Raw logits [C,V], kept as they are. Label -100 gives log-probability 0; the entropy needs none.
    """
    check("log_probs", logits)
    check_rows(logits, labels)
    chosen, entropy = (
        torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    if logits.numel():
        with on_device_of(logits):
            log_probs_kernel[(logits.shape[0],)](
                logits, labels.contiguous(), chosen, entropy, logits.stride(0), logits.shape[1],
                SOFTCAP=softcap, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return chosen, entropy


def check_rows(logits: Tensor, labels: Tensor) -> None:
    """Raise `FivefoldError` for anything but logits [C,V] with dense rows and labels [C]."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or logits.stride(1) != 1:
        raise FivefoldError(
            f"logits {tuple(logits.shape)} of strides {logits.stride()} with labels "
            f"{tuple(labels.shape)}",
            "give logits [C,V] with dense rows and labels [C]",
        )


@triton.jit
def load_logits(
    row: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    beyond: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Capped logits of a block in fp32; `beyond` past the vocabulary's end."""
    logits = tl.load(row + columns, mask=columns < size, other=beyond).to(tl.float32)
    if SOFTCAP > 0:
        logits = tl.where(columns < size, tanh(logits / SOFTCAP) * SOFTCAP, beyond)
    return logits


@triton.jit
def sums_of_row(
    row: tl.tensor,
    label: tl.tensor,
    size: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(log-sum-exp, the label's logit, sum of logits) of a row, block by block."""
    largest = float("-inf")
    total = 0.0
    chosen = 0.0
    plain = 0.0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = load_logits(row, columns, size, float("-inf"), SOFTCAP)
        larger = tl.maximum(largest, tl.max(logits, axis=0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base), axis=0)
        largest = larger
        chosen += tl.sum(tl.where(columns == label, logits, 0.0), axis=0)
        plain += tl.sum(tl.where(columns < size, logits, 0.0), axis=0)
    known = (label >= 0) & (label < size)
    return largest + tl.log(total), tl.where(known, chosen, float("nan")), plain


@triton.jit
def slope_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    z_loss: tl.tensor,
    smoothing: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Loss of a row, and the row's slope in place."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    counted = label != IGNORE
    normaliser, chosen, plain = sums_of_row(row, label, size, SOFTCAP, BLOCK)
    # No smoothing must not make a NaN of a word that was ruled out: 0 times infinity is one.
    spread = tl.where(smoothing > 0, smoothing * (plain / size), 0.0)
    loss = normaliser - (1 - smoothing) * chosen - spread + z_loss * normaliser * normaliser
    tl.store(losses + number, tl.where(counted, loss, 0.0))
    steeper = 1 + 2 * z_loss * normaliser
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = load_logits(row, columns, size, float("-inf"), SOFTCAP)
        slope = tl.exp(values - normaliser) * steeper - smoothing / size
        slope = tl.where(columns == label, slope - (1 - smoothing), slope)
        if SOFTCAP > 0:
            bent = values / SOFTCAP
            slope *= 1 - bent * bent
        slope = tl.where(counted, slope, 0.0).to(logits.dtype.element_ty)
        tl.store(row + columns, slope, mask=columns < size)


@triton.jit
def log_probs_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    chosen_of: tl.tensor,
    entropy_of: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Log-probability and entropy of a row."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    normaliser, chosen, _ = sums_of_row(row, label, size, SOFTCAP, BLOCK)
    tl.store(chosen_of + number, tl.where(label == IGNORE, 0.0, chosen - normaliser))
    entropy = 0.0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        surprise = normaliser - load_logits(row, columns, size, float("-inf"), SOFTCAP)
        # A word of probability 0 adds nothing, where 0 times infinity would not be a number.
        certain = surprise == float("inf")
        share = tl.exp(-surprise) * tl.where(certain, 0.0, surprise)
        entropy += tl.sum(share, axis=0)
    tl.store(entropy_of + number, entropy)
