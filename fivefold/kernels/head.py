"""The products of a linear head and of its gradients, a chunk of tokens at a time.

Logits live in one buffer of `chunk` rows, `room`, which takes each chunk in turn and is overwritten
by its slopes. The weight's gradient is summed in `sums`; where the weight's format is narrower it is
rounded into `room`, whose logits have been used by then. The operators here return both, so that
whoever counts memory by operators' results (the dry run does) sees them too.

Where a low format has no fast product of torch's own, and wherever the policy is deterministic, the
products are `cpu/gemm.cpp`'s, each element summed in an order that no chunking changes.
"""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, C chunk
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

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
    """(gradient of hidden [N,D], sums [V,D], room), uninitialised; unwanted ones empty."""
    format = wide(hidden)
    rows = min(chunk, hidden.shape[0])
    narrow = wants.weight and weight.dtype != format
    rounded = weight.numel() * weight.itemsize if narrow else 0
    words = max(rows * weight.shape[0], -(-rounded // format.itemsize))
    return (
        hidden.new_empty(hidden.shape if wants.hidden else 0),
        weight.new_empty(weight.shape if wants.weight else 0, dtype=format),
        hidden.new_empty(words, dtype=format),
    )


def weight_gradient(weight: Tensor, sums: Tensor, room: Tensor) -> Tensor:
    """Where the gradient of the weight [V,D] is, in its format, once all chunks have been added."""
    if weight.dtype == sums.dtype:
        return sums
    # Detached: autograd adds a second gradient, of a tied weight, in place to what is no view.
    return room.view(weight.dtype)[: weight.numel()].view(weight.shape).detach()


def scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """`gradient * scale` in backward: in its own memory, unless the graph is kept for a second one.

    The weight's gradient is the largest tensor there is at the moment when most is held. One that
    lies in a larger `room` gives that back. A compiler that traces both passes is told no more than
    the product: it reuses memory as it sees fit; and nothing is written under `vmap`.
    """
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    traced = isinstance(gradient, FunctionalTensor)
    functorch = torch._C._functorch
    batched = functorch.is_batchedtensor(scale) or functorch.is_legacy_batchedtensor(scale)
    if kept or traced or batched or gradient.untyped_storage().nbytes() > gradient.nbytes:
        return gradient * scale
    return gradient.mul_(scale)


@dataclass(frozen=True)
class HeadProducts:
    """The three products of a head. weight: [V,D] in their operands' format; own: by `gemm`."""

    weight: Tensor
    own: bool

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> HeadProducts:
        """Those for `hidden` and `weight` of these formats on their device."""
        format, own = _format(hidden, weight)
        return cls(weight.to(format), own)

    @property
    def format(self) -> torch.dtype:
        """Of the operands, slopes among them."""
        return self.weight.dtype

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """[C,V], wide, into `out`."""
        operand = hidden.to(self.format)
        if self.own:
            return gemm(operand, self.weight.mT, out=out)
        if self.format == out.dtype:
            return torch.mm(operand, self.weight.mT, out=out)
        return out.copy_(operand @ self.weight.mT)

    def hidden_gradient(self, slope: Tensor, out: Tensor) -> None:
        """Slopes [C,V] times the weight, into `out` [C,D]."""
        if self.own and out.dtype in (self.format, torch.float32):
            gemm(slope, self.weight, out=out)
        else:
            out.copy_(gemm(slope, self.weight) if self.own else slope @ self.weight)

    def add_weight_gradient(self, slope: Tensor, hidden: Tensor, sums: Tensor) -> None:
        """Slopes [C,V], transposed, times hidden [C,D], added to `sums` [V,D]."""
        operand = hidden.to(self.format)
        if self.own:
            gemm(slope.mT, operand, out=sums, accumulate=True)
        elif self.format == sums.dtype:
            sums.addmm_(slope.mT, operand)
        else:
            sums += slope.mT @ operand


class ChunkedHead:
    """Walks the chunks: `logits` of each, then its slopes to `add`; `finish` at the end."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, chunk: int, wants: Wants, into: tuple[Tensor, ...]
    ) -> None:
        self._grad_hidden, self._sums, self._room = into
        self._hidden, self._weight, self._wants = hidden, weight, wants
        self._products = HeadProducts.of(hidden, weight)
        self._chunk = chunk
        self._sums.zero_()

    @property
    def format(self) -> torch.dtype:
        """Of the slopes that `add` takes."""
        return self._products.format

    def chunks(self) -> Iterator[slice]:
        """Rows of each chunk."""
        for start in range(0, self._hidden.shape[0], self._chunk):
            yield slice(start, min(start + self._chunk, self._hidden.shape[0]))

    def logits(self, rows: slice) -> Tensor:
        """[C,V], wide, in the room: valid until the next call."""
        shape = rows.stop - rows.start, self._weight.shape[0]
        out = self._room[: shape[0] * shape[1]].view(shape)
        return self._products.logits(self._hidden[rows], out)

    def add(self, rows: slice, slope: Tensor) -> None:
        """Take the chunk's share of the gradients from its slopes [C,V]."""
        if self._wants.hidden:
            self._products.hidden_gradient(slope, self._grad_hidden[rows])
        if self._wants.weight:
            self._products.add_weight_gradient(slope, self._hidden[rows], self._sums)

    def finish(self) -> None:
        """Round the weight's gradient into its format."""
        if self._wants.weight and self._weight.dtype != self._sums.dtype:
            weight_gradient(self._weight, self._sums, self._room).copy_(self._sums)


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
