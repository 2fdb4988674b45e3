"""The products of a linear head and of its gradients, a chunk of tokens at a time.

Logits live in one buffer of `chunk` rows, which takes each chunk in turn and is overwritten by its
slopes. What forward needs beside its results is one tensor, `workspace`: the operators here return
it, so that whoever counts memory by operators' results (the dry run does) sees it too.

Where a low format has no fast product of torch's own, and wherever the policy is deterministic, the
products are `cpu/gemm.cpp`'s, each element summed in an order that no chunking changes.
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, C chunk
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cpu.gemm import gemm
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.dispatch import low_precision_gemm_is_native

IGNORE = -100


@dataclass(frozen=True)
class Wants:
    """Which gradients forward is to prepare, or backward to compute."""

    hidden: bool
    weight: bool

    @property
    def any(self) -> bool:
        """Whether slopes are needed at all."""
        return self.hidden or self.weight


def wide(x: Tensor) -> torch.dtype:
    """The format of sums over x's: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> None:
    """Raise `KernelError` for anything but hidden [N,D], weight [V,D], labels [N] int64."""
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise KernelError(
            "a head takes hidden [N,D], weight [V,D] and labels [N] int64, not "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)} {labels.dtype}"
        )
    if chunk < 1:
        raise KernelError(f"a chunk has at least one token, not {chunk}")


def results(hidden: Tensor, weight: Tensor, chunk: int, wants: Wants) -> tuple[Tensor, ...]:
    """(gradient of hidden [N,D], of weight [V,D], workspace), uninitialised; unwanted ones empty."""
    rows = min(chunk, hidden.shape[0])
    sums = weight.numel() if wants.weight and weight.dtype != wide(hidden) else 0
    return (
        hidden.new_empty(hidden.shape if wants.hidden else 0),
        weight.new_empty(weight.shape if wants.weight else 0),
        hidden.new_empty(rows * weight.shape[0] + sums, dtype=wide(hidden)),
    )


class ChunkedHead:
    """Walks the chunks: `logits` of each, then its slopes to `add`; `finish` at the end."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, chunk: int, wants: Wants, into: tuple[Tensor, ...]
    ) -> None:
        self.grad_hidden, self.grad_weight, workspace = into
        self._hidden, self._chunk, self._wants = hidden, chunk, wants
        self.format, self._own = _format(hidden, weight)
        self._weight = weight.to(self.format)
        rows, words = min(chunk, hidden.shape[0]), weight.shape[0]
        self._logits = workspace[: rows * words].view(rows, words)
        rest = workspace[rows * words :]
        self._sums = rest.view(weight.shape) if rest.numel() else self.grad_weight
        if wants.weight:
            self._sums.zero_()

    def chunks(self) -> Iterator[slice]:
        """Rows of each chunk."""
        for start in range(0, self._hidden.shape[0], self._chunk):
            yield slice(start, min(start + self._chunk, self._hidden.shape[0]))

    def logits(self, rows: slice) -> Tensor:
        """[C,V], wide, in the buffer: valid until the next call."""
        out = self._logits[: rows.stop - rows.start]
        operand = self._hidden[rows].to(self.format)
        if self._own:
            return gemm(operand, self._weight.mT, out=out)
        if self.format == out.dtype:
            return torch.mm(operand, self._weight.mT, out=out)
        return out.copy_(operand @ self._weight.mT)

    def add(self, rows: slice, slope: Tensor) -> None:
        """Take the chunk's share of the gradients from its slopes [C,V] in the products' format."""
        if self._wants.hidden:
            if self._own and self.grad_hidden.dtype in (self.format, torch.float32):
                gemm(slope, self._weight, out=self.grad_hidden[rows])
            else:
                self.grad_hidden[rows] = self._product(slope, self._weight)
        if self._wants.weight:
            operand = self._hidden[rows].to(self.format)
            if self._own:
                gemm(slope.mT, operand, out=self._sums, accumulate=True)
            elif self.format == self._sums.dtype:
                self._sums.addmm_(slope.mT, operand)
            else:
                self._sums += slope.mT @ operand

    def finish(self) -> None:
        """Round the weight's gradient into its format."""
        if self._wants.weight and self._sums is not self.grad_weight:
            self.grad_weight.copy_(self._sums)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return gemm(a, b) if self._own else a @ b


def _format(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, bool]:
    """The operands' format in the products, and whether these are `gemm`'s."""
    common = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    own = dispatch.is_native("linear", device, common)
    # Slopes of rare words vanish in fp16, which only scaling by the loss's scale would prevent.
    through_fp32 = own and common == torch.float16
    if through_fp32 or not (own or low_precision_gemm_is_native(device, common)):
        return torch.float32, dispatch.is_native("linear", device, torch.float32)
    return common, own
