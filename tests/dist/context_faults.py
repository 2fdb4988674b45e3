"""Known mistakes of context parallelism, planted on purpose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fivefold.axes.cp import online, ring, sight
from fivefold.axes.cp.axis import ContextAxis
from fivefold.axes.cp.gather import GatherAttention
from fivefold.axes.cp.split import ContextSplit, LocalBatch, tokens_in
from fivefold.model.attention_backend import causal_mask

Patch = AbstractContextManager[Any]


def keys_off_by_one() -> Patch:
    """The mask takes every key for its successor."""
    return mock.patch.object(
        sight, "causal_mask", lambda queries, keys, window: causal_mask(queries, keys + 1, window)
    )


def documents_forgotten() -> Patch:
    """Keys of other documents are seen."""
    real = ContextAxis.attention
    return mock.patch.object(
        ContextAxis, "attention", lambda self, documents, *rest: real(self, None, *rest)
    )


def documents_of_this_rank_for_all() -> Patch:
    """The keys that arrive are taken for this rank's own documents'."""
    real = sight.Sight.mask

    def mask(self: sight.Sight, piece: Any, keys: Any, *rest: Any) -> Any:
        return real(
            self, piece, self.runs if tokens_in(keys) == tokens_in(self.runs) else keys, *rest
        )

    return mock.patch.object(sight.Sight, "mask", mask)


def gradient_hop_lost() -> Patch:
    """What other ranks found for this rank's keys does not come home."""
    real = ring.Ring.pass_on

    def pass_on(self: Any, leaving: Tensor, arriving: Tensor, tag: int) -> Any:
        return real(self, leaving * 0 if tag == ring.GRADIENTS else leaving, arriving, tag)

    return mock.patch.object(ring.Ring, "pass_on", pass_on)


def results_averaged() -> Patch:
    """Blocks join in equal parts, whatever their scores."""
    return mock.patch.object(online.torch, "lerp", lambda ours, theirs, share: (ours + theirs) / 2)


def own_gradients_only() -> Patch:
    """Gathered keys' gradients are cut, not summed."""

    def scatter(self: GatherAttention, whole: Tensor) -> Tensor:
        return torch.cat([whole[run.start : run.stop] for run in self.sight.runs])

    return mock.patch.object(GatherAttention, "scatter", scatter)


def copies_without_gradient() -> Patch:
    """Only the first copy of a key head that several ranks read returns a gradient."""

    def repeat(x: Tensor, copies: int, dim: int) -> Tensor:
        return torch.stack([x, *[x.detach()] * (copies - 1)], dim + 1).flatten(dim, dim + 1)

    return mock.patch.object(torch.Tensor, "repeat_interleave", repeat)


def _changed(change: Callable[[LocalBatch], LocalBatch]) -> Patch:
    real = ContextSplit.split
    return mock.patch.object(ContextSplit, "split", lambda self, *rows: change(real(self, *rows)))


def positions_from_zero() -> Patch:
    """Every rank counts its own tokens."""
    return _changed(
        lambda local: replace(
            local, positions=torch.arange(local.tokens.shape[1]).expand_as(local.tokens)
        )
    )


def labels_of_the_shard() -> Patch:
    """Labels made from a rank's own tokens: at a border, the next chunk's or document's."""

    def change(local: LocalBatch) -> LocalBatch:
        return replace(local, labels=local.tokens.roll(-1, 1).where(local.labels != -100, -100))

    return _changed(change)


FAULTS: dict[str, Callable[[], Patch]] = {
    "": nullcontext,
    **{
        fault.__name__: fault
        for fault in (
            keys_off_by_one, documents_forgotten, documents_of_this_rank_for_all,
            gradient_hop_lost, results_averaged, own_gradients_only, copies_without_gradient,
            positions_from_zero, labels_of_the_shard,
        )
    },
}  # fmt: skip


def planted(fault: str) -> Patch:
    return FAULTS[fault]()
