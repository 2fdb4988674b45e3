"""Binding of cross_entropy.cpp: a chunk of logits, overwritten by slopes."""

from __future__ import annotations

# C rows of a chunk, V vocabulary
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from fivefold.kernels.cpu.library import FORMATS, KernelError, function, pointer

LOSSES = (
    c_long, c_long, c_void_p, c_void_p, c_float, c_float, c_float, c_int, c_int, c_void_p, c_int,
)  # fmt: skip
LOG_PROBS = (c_long, c_long, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int)
SLOPES = (c_long, c_long, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int, c_int)
PART_SUMS = (c_long, c_long, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_int)
PART_SLOPES = (
    c_long, c_long, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_int, c_int,
)  # fmt: skip
BAD_LABEL = 3


def cross_entropy_slope_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Losses [C] of logits [C,V] fp32, whose memory then holds their slopes [C,V] in `dtype`.

    Without a `dtype` there are no slopes. The slopes of a narrow format lie at the starts of rows.
    Raises `KernelError` for a label outside of the vocabulary.
    """
    labels = _check(logits, labels)
    losses = logits.new_empty(logits.shape[0])
    status = function("fivefold_cross_entropy", *LOSSES)(
        *logits.shape, pointer(logits), pointer(labels), softcap or 0.0, z_loss, label_smoothing,
        FORMATS[dtype or torch.float32], dtype is not None, pointer(losses),
        torch.get_num_threads(),
    )  # fmt: skip
    _raise(status, logits, labels)
    return losses, slopes_within(logits, dtype or torch.float32)


def log_probs_(logits: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the labels [C], entropies [C]); logits [C,V] fp32 are capped in place."""
    labels = _check(logits, labels)
    found, entropies = logits.new_empty(2, logits.shape[0])
    status = function("fivefold_log_probs", *LOG_PROBS)(
        *logits.shape, pointer(logits), pointer(labels), softcap or 0.0, pointer(found),
        pointer(entropies), torch.get_num_threads(),
    )  # fmt: skip
    _raise(status, logits, labels)
    return found, entropies


def log_probs_slope_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Slopes [C,V] in the memory of logits [C,V] fp32; `grads` are of what `log_probs_` returns."""
    labels = _check(logits, labels)
    of_log_probs, of_entropies = (g.float().contiguous() for g in grads)
    status = function("fivefold_log_probs_slopes", *SLOPES)(
        *logits.shape, pointer(logits), pointer(labels), softcap or 0.0, pointer(of_log_probs),
        pointer(of_entropies), FORMATS[dtype], torch.get_num_threads(),
    )  # fmt: skip
    _raise(status, logits, labels)
    return slopes_within(logits, dtype)


def part_sums_(logits: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    """[3,C]: see `head_part_sums_`; logits [C,V] fp32 are capped in place."""
    labels = _check(logits, labels)
    found = logits.new_empty(3, logits.shape[0])
    status = function("fivefold_part_sums", *PART_SUMS)(
        *logits.shape, pointer(logits), pointer(labels), softcap or 0.0,
        *(pointer(row) for row in found), torch.get_num_threads(),
    )  # fmt: skip
    _raise(status, logits, labels)
    return found


def part_slopes_(
    logits: Tensor,
    labels: Tensor,
    softcap: float | None,
    largest: Tensor,
    total: Tensor,
    rise: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Slopes [C,V] in the memory of capped logits [C,V] fp32; see `head_part_gradients_`."""
    labels = _check(logits, labels)
    of_all = [x.float().contiguous() for x in (largest, total, rise)]
    if any(x.shape != labels.shape for x in of_all):
        raise KernelError(f"{labels.shape[0]} rows have as many sums, not {list(largest.shape)}")
    status = function("fivefold_part_slopes", *PART_SLOPES)(
        *logits.shape, pointer(logits), pointer(labels), softcap or 0.0,
        *(pointer(x) for x in of_all), FORMATS[dtype], torch.get_num_threads(),
    )  # fmt: skip
    _raise(status, logits, labels)
    return slopes_within(logits, dtype)


def slopes_within(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """[C,V] in `dtype`, each row at the start of the memory of its logits."""
    return logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]


def _check(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dtype != torch.float32 or logits.ndim != 2 or not logits.is_contiguous():
        raise KernelError(
            f"chunks of logits are dense fp32 [C,V], not {logits.dtype} {logits.ndim}d"
        )
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise KernelError(
            f"labels of {logits.shape[0]} rows are int64 [{logits.shape[0]}], "
            f"not {labels.dtype} {list(labels.shape)}"
        )
    return labels.contiguous()


def _raise(status: int, logits: Tensor, labels: Tensor) -> None:
    if status == BAD_LABEL:
        words = logits.shape[1]
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= words))]
        raise KernelError(f"label {wrong[0].item()} is not among {words} words, nor -100 for none")
    if status:
        raise KernelError(f"no native cross-entropy of {logits.dtype}")
