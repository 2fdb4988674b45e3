"""Whole parameters on every rank: DDP, ZeRO-1 and ZeRO-2 (Rajbhandari et al. 2020), and one rank.

| | parameters | gradients | masters and moments |
|---|---|---|---|
| DDP | whole | whole | whole |
| ZeRO-1 | whole | whole | 1/R |
| ZeRO-2 | whole | 1/R | 1/R |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold.axes.dp.bucket import Bucket, make_buckets, shard_of
from fivefold.axes.dp.host import HostGradients, host_copy
from fivefold.axes.dp.protocol import decoder_name
from fivefold.axes.dp.reducer import AllReducer, Groups, ScatterReducer
from fivefold.axes.dp.rows import local, rows_as_dtensor
from fivefold.axes.mesh import all_reduced, data_group, group_of
from fivefold.core.layout import Layout


class ReplicatedAxis:
    """Compute parameters of `dtype` on every rank, fp32 masters whole or in rows of dim 0."""

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: Layout,
        mesh: DeviceMesh | None,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        self.module = module
        self._groups = Groups(
            data_group(mesh), group_of(mesh, "dp_shard"), group_of(mesh, "dp_replicate")
        )
        self._ranks = layout.dp_shard
        self._rank = 0 if self._groups.shard is None else dist.get_rank(self._groups.shard)
        self._host = HostGradients() if layout.offload == "optimizer" else None
        named = [(decoder_name(n), p) for n, p in module.named_parameters()]
        self._masters = {
            name: self._master(parameter, dtype, mesh if self._ranks > 1 else None)
            for name, parameter in named
        }
        module.to(dtype)
        self._parameters = dict(named)
        self._buckets = make_buckets(named, bucket_bytes)
        scatter = self._ranks > 1 and layout.zero == 2
        self._reducer = (ScatterReducer if scatter else AllReducer)(
            self._buckets, self._groups, wire_dtype
        )
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> dict[str, Tensor]:
        """fp32 masters by name."""
        return dict(self._masters)

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of this rank's masters, summed over data ranks."""
        return self._gradients

    def begin(self, last: bool) -> None:
        """Announce a micro-batch."""
        self._reducer.begin(last)

    def reduce(self) -> None:
        """Wait for the sums, and lay hold of the rows that belong to this rank's masters."""
        self._reducer.finish()
        found = self._reducer.gradients()
        if isinstance(self._reducer, AllReducer) and self._ranks > 1:
            found = {n: shard_of(g, self._rank, self._ranks) for n, g in found.items()}
        self._gradients = self._host.fetch(found) if self._host else found

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the compute parameters, gathering the other ranks' rows."""
        if self._groups.shard is not None:
            for bucket in self._buckets:
                self._gather(bucket)
            return
        for name, parameter in self._parameters.items():
            if self._masters[name].data_ptr() != parameter.data_ptr():
                parameter.copy_(self._masters[name], non_blocking=True)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._reducer.zero()
        self._gradients = {}

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over all data ranks."""
        return all_reduced(value, self._groups.data)

    def sum_shards(self, value: Tensor) -> Tensor:
        """`value` summed over the ranks that divide the masters."""
        return all_reduced(value, self._groups.shard)

    def _master(
        self, parameter: nn.Parameter, dtype: torch.dtype, mesh: DeviceMesh | None
    ) -> Tensor:
        """The fp32 value of this rank's rows, or of all: the parameter's own memory where it can."""
        value = parameter.detach()
        rows = value if mesh is None else shard_of(value, self._rank, self._ranks)
        if self._host:
            rows = host_copy(rows)
        elif dtype != torch.float32:
            rows = rows.to(torch.float32, copy=True)
        return rows if mesh is None else rows_as_dtensor(rows, value, mesh)

    def _gather(self, bucket: Bucket) -> None:
        size = bucket.shard_size(self._ranks)
        like = bucket.parameters[0]
        mine = like.new_zeros(size)
        for name, view in zip(
            bucket.names, bucket.shard_views(mine, self._rank, self._ranks), strict=True
        ):
            view.copy_(local(self._masters[name]), non_blocking=True)
        whole = like.new_empty(size * self._ranks)
        dist.all_gather_single(whole, mine, group=self._groups.shard)
        for rank, flat in enumerate(whole.chunk(self._ranks)):
            views = bucket.shard_views(flat, rank, self._ranks)
            for parameter, view in zip(bucket.parameters, views, strict=True):
                shard_of(parameter, rank, self._ranks).copy_(view)
