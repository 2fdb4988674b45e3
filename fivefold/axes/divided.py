"""Width: parameters cut for tensor and expert parallelism. Depth: the stages of a pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from fivefold.axes.dp.protocol import Cut, decoder_name
from fivefold.axes.dp.sharded import Units
from fivefold.axes.mesh import Mesh, subgroup
from fivefold.axes.part import Slice
from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.split import estimate_costs, split_layers
from fivefold.axes.tp.divide import TensorAxis, divide
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig


@dataclass(frozen=True)
class Depth:
    """The stages of this rank.

    module: all of them, what the data axis wraps. stages: by their number in the schedule. units:
    what FSDP gathers at a time.
    """

    module: nn.Module
    stages: Mapping[int, nn.Module]
    units: Units
    cut: Cut


def divide_width(objective: nn.Module, layout: Layout, mesh: Mesh | None) -> Cut:
    """Cut parameters for tensor and expert parallelism, in place."""
    decoder = objective.decoder
    if mesh is None or layout.tp == 1:
        return Cut({n: Slice.of(p) for n, p in decoder.named_parameters()})
    group = mesh.group(("tp",))
    assert group is not None
    rank, ranks = mesh.place(("tp",))
    axis = TensorAxis(group, rank, ranks, layout.sequence_parallel, _kv_group(mesh, decoder.config))
    divided = divide(decoder, axis)
    objective.cross_entropy = axis.head(divided.slices)
    return Cut(divided.slices, tuple(divided.sums))


def divide_depth(
    objective: nn.Module, layout: Layout, mesh: Mesh | None, cut: Cut, sequence_length: int
) -> Depth:
    """Take this rank's stages out of the whole model."""
    if mesh is None or layout.pp == 1:
        return Depth(objective, {0: objective}, _units([objective]), cut)
    schedule = placement_of(layout)
    layers = split_layers(estimate_costs(objective.decoder, sequence_length), schedule.stages)
    rank, _ = mesh.place(("pp",))
    # A part that two stages compute (DualPipe's two directions) is one module where one rank has both.
    parts = {part: objective.stage(layers[part]) for part in _parts(schedule, rank)}
    stages = {stage: parts[schedule.part(stage)] for stage in schedule.held(rank)}
    module = nn.ModuleList(parts.values())
    names = {decoder_name(name) for name, _ in module.named_parameters()}
    return Depth(module, stages, _units(list(parts.values())), _copied(schedule, mesh, cut, names))


def placement_of(layout: Layout) -> Schedule:
    """A schedule of the layout's kind, for its stages and where they lie."""
    virtual = layout.virtual if layout.virtual > 1 else None
    return build_schedule(layout.schedule, layout.pp, 2 * layout.pp, virtual)


def _parts(schedule: Schedule, rank: int) -> list[int]:
    return sorted({schedule.part(stage) for stage in schedule.held(rank)})


def _copied(schedule: Schedule, mesh: Mesh, cut: Cut, names: set[str]) -> Cut:
    """Account for parameters that two pipeline ranks hold: their gradients are to be added."""
    rank, ranks = mesh.place(("pp",))
    slices, sums = dict(cut.slices), [(n, group) for n, group in cut.sums if n in names]
    ends = [_parts(schedule, r) for r in range(ranks)]
    pairs: list[tuple[int, int]] = []
    if schedule.directions == 2:
        pairs, held = [(r, ranks - 1 - r) for r in range(ranks // 2)], names
    elif ends[0][0] == 0 and schedule.stages - 1 not in ends[0]:
        pairs, held = [(0, ranks - 1)], names & {"embedding.weight"}  # if the head is tied to it
    rows = [[row[a], row[b]] for row in mesh.ranks(("pp",)) for a, b in pairs]
    group = subgroup(rows) if rows else None
    if group is not None and (schedule.directions == 2 or _is_tied(cut)):
        for name in held:
            slices[name] = slices[name].copied(int(rank >= ranks / 2), 2)
            sums.append((name, group))
    return Cut(slices, tuple(sums))


def _is_tied(cut: Cut) -> bool:
    return "head.weight" not in cut.slices


def _units(stages: list[nn.Module]) -> Units:
    blocks, experts = [], []
    for stage in stages:
        decoder = stage.decoder
        for index in decoder.here:
            block = decoder.layers[index]
            blocks.append(block)
            experts += [m for n, m in block.named_modules() if n.endswith(".experts")]
    return Units(tuple(experts), tuple(blocks), tuple(stages))


def _kv_group(mesh: Mesh, config: ModelConfig) -> dist.ProcessGroup | None:
    """Of the tensor ranks that hold the same key/value head, where there are more ranks."""
    ranks = mesh.layout.tp
    if ranks <= config.num_kv_heads:
        return None
    each = ranks // config.num_kv_heads
    return subgroup(
        [
            row[start : start + each]
            for row in mesh.ranks(("tp",))
            for start in range(0, ranks, each)
        ]
    )
