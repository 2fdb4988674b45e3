"""The one place that fixes the order in which axes and wrappers are put around a model."""

from __future__ import annotations

from typing import Literal

import torch

from fivefold.axes.check import check_model
from fivefold.axes.divided import divide_depth, divide_width
from fivefold.axes.dp.compression.choose import check_compression, choose
from fivefold.axes.dp.protocol import DataAxis, decoder_name
from fivefold.axes.dp.replicated import ReplicatedAxis
from fivefold.axes.dp.sharded import ShardedAxis
from fivefold.axes.mesh import Mesh, alone_mesh, check_rows
from fivefold.axes.parallel import ParallelModel
from fivefold.axes.part import Part
from fivefold.axes.recompute import recompute_blocks
from fivefold.axes.runners import divide_sequences, make_runner
from fivefold.core.config import CommunicationSection, MoESection, PrecisionSection
from fivefold.core.layout import Layout
from fivefold.model.balance import configure
from fivefold.model.objective import Objective
from fivefold.precision.formats import DTYPES

ASSUMED_LENGTH = 2048  # tokens, for the cost of attention, where nobody said


def apply(
    objective: Objective,
    *,
    layout: Layout,
    mesh: Mesh | None,
    precision: PrecisionSection,
    recompute: Literal["none", "selective", "full"] = "none",
    recompute_every: int = 1,
    compile: bool = False,
    communication: CommunicationSection = CommunicationSection(),
    bucket_bytes: int | None = None,
    sequence_length: int | None = None,
    moe: MoESection = MoESection(),
    device: torch.device | None = None,
) -> ParallelModel:
    """Put `objective`, a module with a `decoder`, on the ranks of `layout`.

    The decoder has fp32 values, or is on the meta device: then memory is made on `device` for
    what this rank holds, and `ParallelModel.fill` gives it values. `bucket_bytes`: in place of
    `communication.bucket_mib`.

    The order: sequences over context ranks, width (tensor and expert parallelism cut parameters), activation checkpointing
    around blocks, compilation of each block (so that the compiler sees the recomputation), depth
    (pipeline stages take blocks), the data axis outermost. Raises LayoutError for what cannot be
    run.
    """
    decoder = objective.decoder
    check_model(layout, decoder.config, sequence_length)
    check_compression(communication, layout)
    check_rows(layout, dict(decoder.named_parameters()))
    first = next(decoder.parameters())
    device = device or first.device
    sharded = layout.offload == "parameters" or (layout.shards > 1 and layout.zero == 3)
    if sharded and mesh is None:
        mesh = alone_mesh(layout, device.type)
    divide = divide_sequences(objective, layout, mesh)
    cut = divide_width(objective, layout, mesh)
    check_rows(layout, dict(decoder.named_parameters()))
    recompute_blocks(decoder.layers, recompute, recompute_every)
    if compile:
        for block in decoder.layers:
            block.compile()
    depth = divide_depth(objective, layout, mesh, cut, sequence_length or ASSUMED_LENGTH)
    dtype = DTYPES[precision.dtype]
    wire = _wire_format(precision, communication)
    axis: DataAxis
    if sharded:
        assert mesh is not None
        axis = ShardedAxis(
            depth.module, depth.units, depth.cut,
            layout=layout, mesh=mesh, device=device, dtype=dtype, wire_dtype=wire,
        )  # fmt: skip
    else:
        axis = ReplicatedAxis(
            depth.module, depth.cut,
            layout=layout, mesh=mesh, device=device, dtype=dtype, wire_dtype=wire,
            bucket_bytes=bucket_bytes or round(communication.bucket_mib * 2**20),
            compress=choose(communication, wire),
        )  # fmt: skip
    runner = make_runner(depth, axis, layout, mesh, device, dtype)
    buffers = {
        name: Part(buffer, depth.cut.slices[name])
        for name, buffer in ((decoder_name(n), b) for n, b in depth.module.named_buffers())
    }
    return ParallelModel(
        axis, runner, mesh, device, configure(depth.module, moe), buffers,
        twin=depth.twin, divide=divide,
    )  # fmt: skip


def _wire_format(precision: PrecisionSection, communication: CommunicationSection) -> torch.dtype:
    """Of gradients that travel whole."""
    if communication.compression == "bf16":
        return torch.bfloat16
    return DTYPES["fp64" if precision.dtype == "fp64" else precision.reduce]
