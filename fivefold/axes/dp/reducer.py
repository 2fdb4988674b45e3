"""Summing gradients over data ranks while backward runs.

`AllReducer` keeps the whole gradient on each rank (DDP, ZeRO-1); `ScatterReducer` keeps this rank's
rows and drops the rest as soon as they are summed (ZeRO-2). Both collect in fp32, whatever the
compute format, so that accumulation over micro-batches loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.dp.bucket import Bucket, shard_of
from fivefold.axes.dp.compression.protocol import Compressor, MakeCompressor, Rounds
from fivefold.axes.dp.compression.wire import Wire
from fivefold.axes.dp.groups import Groups


@dataclass
class Progress:
    """Of one bucket in the running backward."""

    missing: int
    works: list[dist.Work] = field(default_factory=list)
    rounds: Rounds = field(default_factory=lambda: iter(()))
    wire: Tensor | None = None
    sent: Tensor | None = None  # must live until it is


class Reducer(ABC):
    """Notices when a bucket's gradients are complete and sends it off.

    Collectives start in the buckets' order on every rank, whatever the order in which gradients
    come in: ranks that started them in different orders would add up different things.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Groups, wire_dtype: torch.dtype) -> None:
        self.buckets = list(buckets)
        self.groups = groups
        self.wire_dtype = wire_dtype
        self._progress = [Progress(len(b.parameters)) for b in self.buckets]
        self._sending = True
        self._next = len(self.buckets)  # the bucket to send next; nothing is due before `begin`
        self._unsettled = False  # collectives of the micro-batch before may still run
        for index, bucket in enumerate(self.buckets):
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(index, place))

    def begin(self, last: bool, times: Mapping[str, int] | None = None) -> None:
        """Start counting the gradients of a micro-batch, or of several whose backwards take turns.

        times: how many gradients of a parameter come until it is whole; one, if nothing is said.
        Collectives of the one before go on during its forward; its first gradient waits for them.
        """
        self._flush()
        self._sending = self.sends(last)
        self._next = 0
        self._unsettled = True
        for bucket, progress in zip(self.buckets, self._progress, strict=True):
            progress.missing = sum((times or {}).get(name, 1) for name in bucket.names)

    def finish(self) -> None:
        """Send what is left, and wait for all."""
        self._flush()
        self._settle()

    @abstractmethod
    def sends(self, last: bool) -> bool:
        """Whether this micro-batch's gradients are communicated."""

    @abstractmethod
    def collect(self, index: int, place: int, parameter: Tensor) -> None:
        """Take over `parameter.grad`."""

    @abstractmethod
    def send(self, index: int, progress: Progress) -> None:
        """Start the bucket's collectives."""

    @abstractmethod
    def received(self, index: int, progress: Progress) -> None:
        """Take what the collectives gave, and start those of the next round if there is one."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients by name, whole or this rank's rows; valid after `finish`."""

    @abstractmethod
    def zero(self) -> None:
        """Forget all gradients."""

    def state(self) -> dict[str, Tensor]:
        """What this rank carries over from step to step; see `Compressor.state`."""
        return {}

    def _hook(self, index: int, place: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._unsettled:
                self._settle()
            self.collect(index, place, parameter)
            self._progress[index].missing -= 1
            self._send_complete()

        return hook

    def _flush(self) -> None:
        """Send the buckets that still lack a gradient, of a parameter that was not used."""
        for progress in self._progress:
            progress.missing = 0
        self._send_complete()

    def _send_complete(self) -> None:
        while (
            self._sending
            and self._next < len(self.buckets)
            and self._progress[self._next].missing == 0
        ):
            self.send(self._next, self._progress[self._next])
            self._next += 1

    def _settle(self) -> None:
        self._unsettled = False
        while any(progress.works for progress in self._progress):
            for index, progress in enumerate(self._progress):
                works, progress.works = progress.works, []
                for work in works:
                    work.wait()
                if works:
                    self.received(index, progress)


class AllReducer(Reducer):
    """One flat fp32 gradient a bucket, summed in the last micro-batch's backward.

    It is made when the bucket's first gradient comes, and dropped with `zero`: by then backward has
    freed activations, so that the fullest moment of a step has no place for both.

    `compress` makes what sends a bucket, whole in `wire_dtype` if there is none.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Groups,
        wire_dtype: torch.dtype,
        compress: MakeCompressor | None = None,
    ) -> None:
        super().__init__(buckets, groups, wire_dtype)
        self._flats: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._came: set[tuple[int, int]] = set()  # which of them hold something
        make = compress or partial(Wire, dtype=wire_dtype)
        self._compressors: list[Compressor] = []
        if groups.data is not None:
            self._compressors = [make(bucket, groups.data) for bucket in self.buckets]

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name."""
        return {
            name: view
            for index, bucket in enumerate(self.buckets)
            for name, view in zip(bucket.names, self._held(index), strict=True)
        }

    def sends(self, last: bool) -> bool:
        """Only the last: sums of sums are sums."""
        return last

    def collect(self, index: int, place: int, parameter: Tensor) -> None:
        """Add the gradient. The next fp32 ones are accumulated in the view itself."""
        view = self._held(index)[place]
        if parameter.grad is None or parameter.grad is view:
            return
        if (index, place) in self._came:
            view += parameter.grad
        else:  # adding two formats would take a third tensor, as large as the wider one
            view.copy_(parameter.grad)
            self._came.add((index, place))
        parameter.grad = view if parameter.dtype == view.dtype else None

    def send(self, index: int, progress: Progress) -> None:
        """Start summing over all data ranks."""
        if self.groups.data is not None:
            progress.rounds = self._compressors[index].reduce(self._whole(index))
            self.received(index, progress)

    def received(self, index: int, progress: Progress) -> None:
        """Go on to the next round, if there is one."""
        progress.works = next(progress.rounds, [])

    def state(self) -> dict[str, Tensor]:
        """Of all buckets' compressors."""
        return {n: t for each in self._compressors for n, t in each.state().items()}

    def zero(self) -> None:
        """Drop them."""
        self._flats.clear()
        self._views.clear()
        self._came.clear()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _whole(self, index: int) -> Tensor:
        if index not in self._flats:
            self._flats[index] = self.buckets[index].zeros()
            self._views[index] = self.buckets[index].views(self._flats[index])
        return self._flats[index]

    def _held(self, index: int) -> list[Tensor]:
        """The gradients of a bucket's parameters, zeros where none has come."""
        self._whole(index)
        return self._views[index]


class ScatterReducer(Reducer):
    """A bucket's gradient exists in full only until it is reduce-scattered; rows accumulate."""

    def __init__(self, buckets: Sequence[Bucket], groups: Groups, wire_dtype: torch.dtype) -> None:
        super().__init__(buckets, groups, wire_dtype)
        assert groups.shard is not None
        self.rank, self.ranks = groups.rank, groups.ranks
        self._full: list[Tensor | None] = [None] * len(self.buckets)
        self._shards = [b.zeros(b.shard_size(self.ranks)) for b in self.buckets]

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

    def collect(self, index: int, place: int, parameter: Tensor) -> None:
        """Lay the gradient's rows out by the rank that will own them."""
        assert parameter.grad is not None
        for rank, flat in enumerate(self._whole(index).chunk(self.ranks)):
            view = self.buckets[index].shard_views(flat, rank, self.ranks)[place]
            view.copy_(shard_of(parameter.grad, rank, self.ranks))
        parameter.grad = None

    def send(self, index: int, progress: Progress) -> None:
        """Reduce-scatter inside the sharing group, then sum over its copies."""
        full = self._whole(index)
        progress.wire = full.new_empty(full.numel() // self.ranks)
        progress.works = [
            dist.reduce_scatter_single(progress.wire, full, group=self.groups.shard, async_op=True)
        ]
        self._full[index], progress.sent = None, full

    def received(self, index: int, progress: Progress) -> None:
        """Accumulate the summed rows."""
        assert progress.wire is not None
        if self.groups.replicate is not None:
            dist.all_reduce(progress.wire, group=self.groups.replicate)
        self._shards[index] += progress.wire
        progress.wire = progress.sent = None

    def zero(self) -> None:
        """Zeros, in place; whole gradients are gone already."""
        for flat in self._shards:
            flat.zero_()

    def _whole(self, index: int) -> Tensor:
        """The bucket's whole gradient in the format that travels, each rank's rows together."""
        full = self._full[index]
        if full is None:
            bucket = self.buckets[index]
            size = bucket.shard_size(self.ranks) * self.ranks
            full = self._full[index] = bucket.zeros(size, self.wire_dtype)
        return full
