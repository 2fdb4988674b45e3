"""The softmax over words that are a part of the vocabulary; `head_part.py` says what it is for.

As in cross_entropy.py a program owns a row and walks its words in blocks.
"""

# ruff: noqa: N803 (upper case: constants of a compiled kernel)
from __future__ import annotations

# C rows, V words of this rank
import torch
from torch import Tensor

from fivefold.kernels.triton.cross_entropy import BLOCK, IGNORE, WARPS, check_rows
from fivefold.kernels.triton.gated import tanh
from fivefold.kernels.triton.language import check, on_device_of, tl, triton


def part_sums_(logits: Tensor, labels: Tensor, softcap: float) -> Tensor:
    """[3,C] fp32: the largest logit, the sum of exponentials from it on, the label's logit or 0.

    Raw logits [C,V] are overwritten by softcap tanh(logits / softcap), unless that is 0.
    """
    check("part_sums_", logits)
    check_rows(logits, labels)
    rows, words = logits.shape
    found = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
    if words == 0:
        found[0] = torch.finfo(torch.float32).min
    elif rows:
        with on_device_of(logits):
            sums_kernel[(rows,)](
                logits, labels.contiguous(), found, logits.stride(0), words, rows,
                SOFTCAP=softcap, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return found


def part_slopes_(
    logits: Tensor, labels: Tensor, softcap: float, largest: Tensor, total: Tensor, rise: Tensor
) -> None:
    """Capped logits [C,V] become rise * exp(logits - largest) / total - (is label), uncapped.

    largest, total, rise: [C] fp32 over all ranks' words. A rise of 0 gives slopes of 0.
    """
    check("part_slopes_", logits)
    check_rows(logits, labels)
    if logits.numel():
        with on_device_of(logits):
            slopes_kernel[(logits.shape[0],)](
                logits, labels.contiguous(), largest.contiguous(), total.contiguous(),
                rise.contiguous(), logits.stride(0), logits.shape[1],
                SOFTCAP=softcap, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip


@triton.jit
def sums_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    found: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    rows: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The three numbers of a row, its logits capped on the way."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    largest = float("-inf")
    total = 0.0
    chosen = 0.0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        within = columns < size
        values = tl.load(row + columns, mask=within, other=float("-inf")).to(tl.float32)
        if SOFTCAP > 0:
            values = tl.where(within, tanh(values / SOFTCAP) * SOFTCAP, float("-inf"))
            tl.store(row + columns, values.to(logits.dtype.element_ty), mask=within)
        larger = tl.maximum(largest, tl.max(values, axis=0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), axis=0)
        largest = larger
        chosen += tl.sum(tl.where(columns == label, values, 0.0), axis=0)
    tl.store(found + number, largest)
    tl.store(found + rows + number, total)
    tl.store(found + 2 * rows + number, chosen)


@triton.jit
def slopes_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    largest_of: tl.tensor,
    total_of: tl.tensor,
    rise_of: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The slopes of a row in place of its capped logits."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    largest = tl.load(largest_of + number)
    rise = tl.load(rise_of + number)
    share = rise / tl.load(total_of + number)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32)
        slope = tl.exp(values - largest) * share
        slope = tl.where((columns == label) & (label != IGNORE), slope - 1.0, slope)
        if SOFTCAP > 0:
            bent = values / SOFTCAP
            slope *= 1 - bent * bent
        slope = tl.where(rise == 0.0, 0.0, slope).to(logits.dtype.element_ty)
        tl.store(row + columns, slope, mask=columns < size)
