"""Summing gradients over data ranks while backward runs.

`AllReducer` keeps the whole gradient on each rank (DDP, ZeRO-1); `ScatterReducer` keeps this rank's
rows and drops the rest as soon as they are summed (ZeRO-2). Both collect in fp32, whatever the
compute format, so that accumulation over micro-batches loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.dp.bucket import Bucket, flat_like, shard_of


@dataclass(frozen=True)
class Groups:
    """Who sums: `data` all ranks, `shard` those that share state, `replicate` the copies."""

    data: dist.ProcessGroup | None
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None


@dataclass
class _Progress:
    """Of one bucket in the running backward."""

    missing: int = 0
    works: list[dist.Work] = field(default_factory=list)
    wire: Tensor | None = None


class Reducer:
    """Notices when a bucket's gradients are complete and sends it off, in the buckets' order."""

    def __init__(self, buckets: Sequence[Bucket], groups: Groups, wire_dtype: torch.dtype) -> None:
        self.buckets = list(buckets)
        self.groups = groups
        self.wire_dtype = wire_dtype
        self._sending = True
        self._progress = [_Progress(len(b.parameters)) for b in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(index, place))

    def begin(self, last: bool) -> None:
        """Start counting the gradients of a micro-batch."""
        self._sending = self.sends(last)
        for bucket, progress in zip(self.buckets, self._progress, strict=True):
            progress.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Send buckets with unused parameters too, and wait for all."""
        for index, progress in enumerate(self._progress):
            if progress.missing and self._sending:
                progress.missing = 0
                self.send(index, progress)
        for index, progress in enumerate(self._progress):
            self._settle(index, progress)

    def sends(self, last: bool) -> bool:
        """Whether this micro-batch's gradients are communicated."""
        raise NotImplementedError

    def collect(self, index: int, place: int, parameter: nn.Parameter) -> None:
        """Take over `parameter.grad`."""
        raise NotImplementedError

    def send(self, index: int, progress: _Progress) -> None:
        """Start the bucket's collectives."""
        raise NotImplementedError

    def received(self, index: int, progress: _Progress) -> None:
        """Take what the collectives gave."""
        raise NotImplementedError

    def zero(self) -> None:
        """Forget all gradients."""
        raise NotImplementedError

    def _hook(self, index: int, place: int):  # type: ignore[no-untyped-def]
        def hook(parameter: Tensor) -> None:
            progress = self._progress[index]
            if progress.missing == len(self.buckets[index].parameters):
                self._settle(index, progress)  # of the micro-batch before
            self.collect(index, place, parameter)  # type: ignore[arg-type]
            progress.missing -= 1
            if progress.missing == 0 and self._sending:
                self.send(index, progress)

        return hook

    def _settle(self, index: int, progress: _Progress) -> None:
        for work in progress.works:
            work.wait()
        if progress.works or progress.wire is not None:
            self.received(index, progress)
        progress.works, progress.wire = [], None


class AllReducer(Reducer):
    """One flat fp32 gradient a bucket, all-reduced in the last micro-batch's backward."""

    def __init__(self, buckets: Sequence[Bucket], groups: Groups, wire_dtype: torch.dtype) -> None:
        super().__init__(buckets, groups, wire_dtype)
        self._flats = [flat_like(b.parameters[0], b.numel, torch.float32) for b in self.buckets]
        self._views = [b.views(f) for b, f in zip(self.buckets, self._flats, strict=True)]
        self._attach()

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name."""
        return {
            name: view
            for bucket, views in zip(self.buckets, self._views, strict=True)
            for name, view in zip(bucket.names, views, strict=True)
        }

    def sends(self, last: bool) -> bool:
        """Only the last: sums of sums are sums."""
        return last

    def collect(self, index: int, place: int, parameter: nn.Parameter) -> None:
        """Add a low-precision gradient; fp32 ones were accumulated in the view itself."""
        view = self._views[index][place]
        if parameter.grad is not None and parameter.grad is not view:
            view += parameter.grad
            parameter.grad = view if parameter.dtype == torch.float32 else None

    def send(self, index: int, progress: _Progress) -> None:
        """All-reduce over all data ranks."""
        if self.groups.data is None:
            return
        flat = self._flats[index]
        if self.wire_dtype != torch.float32:
            flat = progress.wire = flat.to(self.wire_dtype)
        progress.works = [dist.all_reduce(flat, group=self.groups.data, async_op=True)]

    def received(self, index: int, progress: _Progress) -> None:
        """Copy back what travelled in another format."""
        if progress.wire is not None:
            self._flats[index].copy_(progress.wire)

    def zero(self) -> None:
        """Zeros, in place: the buffers live as long as the run."""
        for flat in self._flats:
            flat.zero_()
        self._attach()

    def _attach(self) -> None:
        for bucket, views in zip(self.buckets, self._views, strict=True):
            for parameter, view in zip(bucket.parameters, views, strict=True):
                parameter.grad = view if parameter.dtype == torch.float32 else None


class ScatterReducer(Reducer):
    """A bucket's gradient exists in full only until it is reduce-scattered; rows accumulate."""

    def __init__(self, buckets: Sequence[Bucket], groups: Groups, wire_dtype: torch.dtype) -> None:
        super().__init__(buckets, groups, wire_dtype)
        self.rank = 0 if groups.shard is None else dist.get_rank(groups.shard)
        self.ranks = 1 if groups.shard is None else dist.get_world_size(groups.shard)
        self._full: list[Tensor | None] = [None] * len(self.buckets)
        self._shards = [
            flat_like(b.parameters[0], b.shard_size(self.ranks), torch.float32)
            for b in self.buckets
        ]

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of each gradient by name."""
        return {
            name: view
            for bucket, flat in zip(self.buckets, self._shards, strict=True)
            for name, view in zip(
                bucket.names, bucket.shard_views(flat, self.rank, self.ranks), strict=True
            )
        }

    def sends(self, last: bool) -> bool:
        """Every micro-batch: keeping whole gradients is what this stage saves."""
        return True

    def collect(self, index: int, place: int, parameter: nn.Parameter) -> None:
        """Lay the gradient's rows out by the rank that will own them."""
        bucket = self.buckets[index]
        full = self._full[index]
        if full is None:
            size = bucket.shard_size(self.ranks) * self.ranks
            full = self._full[index] = flat_like(parameter, size, self.wire_dtype)
        for rank, flat in enumerate(full.chunk(self.ranks)):
            view = bucket.shard_views(flat, rank, self.ranks)[place]
            view.copy_(shard_of(parameter.grad, rank, self.ranks))  # type: ignore[arg-type]
        parameter.grad = None

    def send(self, index: int, progress: _Progress) -> None:
        """Reduce-scatter inside the sharing group, then sum over its copies."""
        full = self._full[index]
        if full is None:
            size = self.buckets[index].shard_size(self.ranks) * self.ranks
            full = flat_like(self.buckets[index].parameters[0], size, self.wire_dtype)
        if self.groups.shard is None:
            progress.wire = full
        else:
            progress.wire = full.new_empty(full.numel() // self.ranks)
            work = dist.reduce_scatter_tensor(
                progress.wire, full, group=self.groups.shard, async_op=True
            )
            progress.works = [work]
        self._full[index] = None

    def received(self, index: int, progress: _Progress) -> None:
        """Accumulate the summed rows."""
        assert progress.wire is not None
        if self.groups.replicate is not None:
            dist.all_reduce(progress.wire, group=self.groups.replicate)
        self._shards[index] += progress.wire

    def zero(self) -> None:
        """Zeros, in place."""
        for flat in self._shards:
            flat.zero_()
