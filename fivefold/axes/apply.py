"""The one place that fixes the order in which axes and wrappers are put around a model."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold.axes.dp.protocol import DataAxis
from fivefold.axes.dp.replicated import ReplicatedAxis
from fivefold.axes.dp.sharded import ShardedAxis
from fivefold.axes.mesh import alone_mesh, check_layout, check_rows
from fivefold.axes.recompute import recompute_blocks
from fivefold.core.config import PrecisionSection
from fivefold.core.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.precision.formats import DTYPES

BUCKET_BYTES = 25 * 2**20


def apply(
    objective: nn.Module,
    *,
    layout: Layout,
    mesh: DeviceMesh | None,
    precision: PrecisionSection,
    recompute: Literal["none", "selective", "full"] = "none",
    recompute_every: int = 1,
    compile: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> DataAxis:
    """Wrap `objective`, a module with a `decoder` of fp32 parameters, for `layout`.

    The order: activation checkpointing around blocks, compilation of each block (so that the
    compiler sees the recomputation), the data axis outermost. Raises LayoutError for what cannot
    be run.
    """
    check_layout(layout)
    decoder = objective.decoder
    assert isinstance(decoder, Decoder)
    check_rows(layout, dict(decoder.named_parameters()))
    recompute_blocks(decoder.layers, recompute, recompute_every)
    if compile:
        for block in decoder.layers:
            block.compile()
    dtype, wire = DTYPES[precision.dtype], DTYPES[precision.reduce]
    if layout.offload == "parameters" or (layout.dp_shard > 1 and layout.zero == 3):
        mesh = mesh or alone_mesh(decoder.norm.weight.device.type)
        return ShardedAxis(
            objective, list(decoder.layers), layout=layout, mesh=mesh, dtype=dtype, wire_dtype=wire
        )
    return ReplicatedAxis(
        objective, layout=layout, mesh=mesh, dtype=dtype, wire_dtype=wire,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip
