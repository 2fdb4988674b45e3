"""The one dispatch rule: which implementation of an operator runs where.

Every operator has three twins: plain torch (the reference), native C++ on CPUs (`cpu/`) and Triton
on GPUs (`triton/`). Which one computes is decided here by device, number format, what was compiled
and the policy. The policy is `fast` (whatever measured fastest), or `deterministic`: for every
operator the implementation whose result for a row depends on that row alone, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from fivefold.kernels import triton
from fivefold.kernels.cpu import library

Implementation = Literal["torch", "native", "triton"]

# Products of matrices: on CPUs too, a BLAS with instructions for the format is not to be beaten.
PRODUCTS = frozenset({"linear", "grouped_linear"})
# What vendors' libraries have on GPUs (cuBLAS, cuDNN, FlashAttention).
VENDORS = PRODUCTS | {"flash_attention"}


@dataclass(frozen=True)
class Choice:
    """What computes, and why it and no other."""

    implementation: Implementation
    why: str


class _Policy:
    """Shared by all threads: backward passes of GPU tensors run on threads of autograd's own."""

    deterministic = False
    only: Implementation | None = None


def is_deterministic() -> bool:
    """Whether results of a row must not depend on what else is computed beside it."""
    return _Policy.deterministic


def set_deterministic(on: bool) -> None:
    """Choose the policy of this process from here on."""
    _Policy.deterministic = on


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """The policy within a `with`; back to the former one after it."""
    before = _Policy.deterministic
    set_deterministic(on)
    try:
        yield
    finally:
        set_deterministic(before)


@contextmanager
def only(implementation: Implementation | None) -> Iterator[None]:
    """One implementation within a `with`, where it can be had: to compare and to measure."""
    before = _Policy.only
    _Policy.only = implementation
    try:
        yield
    finally:
        _Policy.only = before


def choose(op: str, device: str, dtype: torch.dtype) -> Choice:
    """The implementation of `op` for operands of `dtype` on a device type."""
    low = low_precision_gemm_is_native(device, dtype)
    return _choose(op, device, dtype, low, _Policy.deterministic, _Policy.only)


# All that `torch.compiler.assume_constant_result` does, which would import the compiler: a second.
choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_own(op: str, device: str, dtype: torch.dtype) -> bool:
    """Whether this package's own operator computes `op`, rather than one that torch brings."""
    own = choose(op, device, dtype).implementation != "torch"
    return own or (is_deterministic() and dtype != torch.float64)


def is_native(op: str, device: str, dtype: torch.dtype) -> bool:
    """Whether the C++ kernel of `op` takes it."""
    return choose(op, device, dtype).implementation == "native"


@functools.cache
def _choose(
    op: str,
    device: str,
    dtype: torch.dtype,
    low: bool,  # whether the BLAS has fast products of `dtype`: a dry run answers for its device
    invariant: bool,
    asked: Implementation | None,
) -> Choice:
    if dtype not in library.FORMATS:
        return Choice("torch", f"{dtype}: only the reference has it")
    if asked == "torch":
        return Choice("torch", "asked for")
    if asked == "native" and device == "cpu" and library.is_available():
        return Choice("native", "asked for")
    if device == "cuda":
        return _on_gpu(op, invariant)
    if device != "cpu":
        return Choice("torch", f"no kernels for {device}")
    if op in PRODUCTS and not invariant and low:
        return Choice("torch", f"fast: the BLAS has {dtype} products")
    if library.is_available():
        return Choice("native", "C++ compiled for this CPU")
    return Choice("torch", f"no native kernels: {'; '.join(library.FALLBACKS)}")


def _on_gpu(op: str, invariant: bool) -> Choice:
    if op in VENDORS and not invariant:
        return Choice("torch", "fast: the vendor's library")
    if triton.is_available():
        return Choice("triton", "Triton is installed")
    return Choice("torch", "Triton is not installed")


def _native_on_cpu() -> frozenset[torch.dtype]:
    """The low formats that this CPU has matrix instructions for and torch uses."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, native in supported.items() if native)


# Asked once: the answer is the machine's, and torch.compile then sees a constant.
NATIVE_ON_CPU = _native_on_cpu()


def low_precision_gemm_is_native(device: str, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies matrices of `dtype` at no less than its fp32 rate."""
    low = dtype == torch.bfloat16 or dtype == torch.float16
    return device != "cpu" or not low or dtype in NATIVE_ON_CPU
