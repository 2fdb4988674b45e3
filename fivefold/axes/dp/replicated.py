"""Whole parameters on every rank: DDP, ZeRO-1 and ZeRO-2 (Rajbhandari et al. 2020), and one rank.

| | parameters | gradients | masters and moments |
|---|---|---|---|
| DDP | whole | whole | whole |
| ZeRO-1 | whole | whole | 1/R |
| ZeRO-2 | whole | 1/R | 1/R |

"Whole" is what the other axes leave of a parameter. Experts have data ranks of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.dp.bucket import Bucket, make_buckets, rows_of, shard_of
from fivefold.axes.dp.compression.protocol import MakeCompressor
from fivefold.axes.dp.groups import Groups, dense_groups, expert_groups
from fivefold.axes.dp.host import HostGradients, host_copy
from fivefold.axes.dp.materialize import materialize
from fivefold.axes.dp.protocol import Cut, decoder_name, is_expert
from fivefold.axes.dp.reducer import AllReducer, Reducer, ScatterReducer
from fivefold.axes.dp.sums import add_parts
from fivefold.axes.mesh import Mesh
from fivefold.axes.part import Part
from fivefold.core.layout import Layout


@dataclass(frozen=True)
class Family:
    """Parameters that the same ranks sum and divide."""

    groups: Groups
    buckets: list[Bucket]
    reducer: Reducer


class ReplicatedAxis:
    """Compute parameters of `dtype` on every rank, fp32 masters whole or in rows of dim 0."""

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        *,
        layout: Layout,
        mesh: Mesh | None,
        device: torch.device,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        bucket_bytes: int,
        compress: MakeCompressor | None = None,
    ) -> None:
        materialize(module, device)
        self.module = module
        self._cut = cut
        self._host = HostGradients() if layout.offload == "optimizer" else None
        named = [(decoder_name(n), p) for n, p in module.named_parameters()]
        self._parameters = dict(named)
        self._dense, self._expert = dense_groups(mesh), expert_groups(mesh)
        self._masters = {n: self._master(n, p, dtype) for n, p in named}
        for _, parameter in named:  # buffers, of routers, stay fp32
            parameter.data = parameter.data.to(dtype)
        self._families = [
            _family(
                part,
                groups,
                bucket_bytes,
                layout.zero == 2 and layout.shards > 1,
                wire_dtype,
                compress,
            )
            for groups, part in (
                (self._dense, [(n, p) for n, p in named if not is_expert(n)]),
                (self._expert, [(n, p) for n, p in named if is_expert(n)]),
            )
            if part
        ]
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> dict[str, Part]:
        """fp32 masters by name."""
        return dict(self._masters)

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of this rank's masters, summed over all that compute them."""
        return self._gradients

    def begin(self, last: bool, times: Mapping[str, int] | None = None) -> None:
        """Announce a micro-batch, or all of a pipeline's."""
        for family in self._families:
            family.reducer.begin(last, times)

    def reduce(self) -> None:
        """Wait for the sums, and lay hold of the rows that belong to this rank's masters."""
        found: dict[str, Tensor] = {}
        for family in self._families:
            family.reducer.finish()
            part = family.reducer.gradients()
            if isinstance(family.reducer, AllReducer):
                groups = family.groups
                part = {n: shard_of(g, groups.rank, groups.ranks) for n, g in part.items()}
            found |= part
        add_parts(found, self._cut.sums)
        self._gradients = self._host.fetch(found) if self._host else found

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the compute parameters, gathering the other ranks' rows."""
        for family in self._families:
            for bucket in family.buckets:
                if family.groups.shard is not None:
                    self._gather(bucket, family.groups)
                else:
                    self._copy(bucket)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for family in self._families:
            family.reducer.zero()
        self._gradients = {}

    def carried(self) -> dict[str, Tensor]:
        """Memories of compressors, by kind and parameter."""
        return {n: t for family in self._families for n, t in family.reducer.state().items()}

    def _master(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        """The fp32 value of this rank's rows, or of all: the parameter's own memory where it can."""
        groups = self._expert if is_expert(name) else self._dense
        value = parameter.detach()
        rows = shard_of(value, groups.rank, groups.ranks)
        master = torch.promote_types(dtype, torch.float32)
        slice = self._cut.slices[name].copied(groups.copy, groups.copies)
        if groups.ranks > 1:
            start = min(-(-value.shape[0] // groups.ranks) * groups.rank, value.shape[0])
            slice = slice.narrow(0, start, rows_of(value, groups.rank, groups.ranks))
        if self._host:
            rows = host_copy(rows, master)
        elif rows.dtype != master or dtype != master:
            rows = rows.to(master, copy=True)
        return Part(rows, slice)

    def _copy(self, bucket: Bucket) -> None:
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            values = self._masters[name].values
            if values.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                parameter.copy_(values, non_blocking=True)

    def _gather(self, bucket: Bucket, groups: Groups) -> None:
        like = bucket.parameters[0]
        mine = like.new_zeros(bucket.shard_size(groups.ranks))
        for name, view in zip(
            bucket.names, bucket.shard_views(mine, groups.rank, groups.ranks), strict=True
        ):
            view.copy_(self._masters[name].values, non_blocking=True)
        whole = like.new_empty(mine.numel() * groups.ranks)
        dist.all_gather_single(whole, mine, group=groups.shard)
        for rank, flat in enumerate(whole.chunk(groups.ranks)):
            views = bucket.shard_views(flat, rank, groups.ranks)
            for parameter, view in zip(bucket.parameters, views, strict=True):
                shard_of(parameter, rank, groups.ranks).copy_(view)


def _family(
    named: list[tuple[str, nn.Parameter]],
    groups: Groups,
    bucket_bytes: int,
    scatter: bool,
    wire_dtype: torch.dtype,
    compress: MakeCompressor | None,
) -> Family:
    # Nothing travels from a rank alone: small gradients go where activations have just been freed.
    buckets = make_buckets(named, bucket_bytes if groups.data is not None else 1)
    if scatter and groups.shard is not None:
        return Family(groups, buckets, ScatterReducer(buckets, groups, wire_dtype))
    return Family(groups, buckets, AllReducer(buckets, groups, wire_dtype, compress))
