"""Width: parameters cut for tensor and expert parallelism. Depth: the stages of a pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.cp.split import ContextSplit, places_of
from fivefold.axes.dp.protocol import Cut, decoder_name
from fivefold.axes.dp.sharded import Units
from fivefold.axes.ep.divide import divide_experts, share_sequences
from fivefold.axes.mesh import EXPERT, SEQUENCE, WIDTH, Mesh, subgroup
from fivefold.axes.part import Slice
from fivefold.axes.pp.build import placement_of
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.split import estimate_costs, split_layers
from fivefold.axes.tp.divide import TensorAxis, divide
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.objective import Objective


@dataclass(frozen=True)
class Depth:
    """The stages of this rank.

    module: all of them, what the data axis wraps. stages: by their number in the schedule. units:
    what FSDP gathers at a time. twin: this rank and the one that holds the same stages for
    micro-batches of the other direction (DualPipe).
    """

    module: nn.Module
    stages: Mapping[int, Objective]
    units: Units
    cut: Cut
    twin: dist.ProcessGroup | None = None


def divide_width(objective: Objective, layout: Layout, mesh: Mesh | None) -> Cut:
    """Cut parameters for tensor and expert parallelism, in place. Buffers are whole everywhere."""
    decoder = objective.decoder
    slices, sums = {n: Slice.of(p) for n, p in decoder.named_parameters()}, []
    if mesh is not None and layout.tp > 1:
        axis = _tensor_axis(mesh, decoder.config)
        divided = divide(decoder, axis)
        slices, sums = divided.slices, divided.sums
        objective.cross_entropy = axis.head(slices)
    if mesh is not None and (group := mesh.group(EXPERT)) is not None:
        slices |= divide_experts(decoder, group)
    if mesh is not None and (group := mesh.group(SEQUENCE)) is not None:
        share_sequences(decoder, group, partial(_places, mesh))
    for name, buffer in decoder.named_buffers():
        slice = Slice.of(buffer)
        slices[name] = slice if mesh is None else slice.copied(*mesh.place(WIDTH))
    return Cut(slices, tuple(sums))


def _tensor_axis(mesh: Mesh, config: ModelConfig) -> TensorAxis:
    group = mesh.group(("tp",))
    assert group is not None
    rank, ranks = mesh.place(("tp",))
    return TensorAxis(group, rank, ranks, mesh.layout.sequence_parallel, _kv_group(mesh, config))


def _places(mesh: Mesh, length: int) -> Tensor:
    """[ranks, length]: where in its row each token stands on the ranks that hold parts of it.

    A context rank's tokens are divided once more over tensor ranks, which take neighbours.
    """
    layout = mesh.layout
    row = next(row for row in mesh.ranks(SEQUENCE) if mesh.rank in row)
    whole = length * layout.cp * layout.tp
    found = []
    for rank in row:
        place = mesh.coordinates(rank)
        split = ContextSplit.of(layout, place["cp"])
        held = places_of(split.runs(whole, place["cp"]), torch.device("cpu"))
        found.append(held[place["tp"] * length : (place["tp"] + 1) * length])
    return torch.stack(found)


def divide_depth(
    objective: Objective, layout: Layout, mesh: Mesh | None, cut: Cut, sequence_length: int
) -> Depth:
    """Take this rank's stages out of the whole model."""
    if mesh is None or layout.pp == 1:
        return Depth(objective, {0: objective}, _units([objective]), cut)
    schedule = placement_of(layout)
    layers = split_layers(
        estimate_costs(objective.decoder, sequence_length), schedule.stages, layout.stage_layers
    )
    rank, _ = mesh.place(("pp",))
    # A part that two stages compute (DualPipe's two directions) is one module where one rank has both.
    parts = {part: objective.stage(layers[part]) for part in _parts(schedule, rank)}
    stages = {stage: parts[schedule.part(stage)] for stage in schedule.held(rank)}
    module = nn.ModuleList(parts.values())
    held = (*module.named_parameters(), *module.named_buffers())
    cut, twin = _copied(schedule, mesh, cut, {decoder_name(name) for name, _ in held})
    return Depth(module, stages, _units(list(parts.values())), cut, twin)


def _parts(schedule: Schedule, rank: int) -> list[int]:
    return sorted({schedule.part(stage) for stage in schedule.held(rank)})


def _copied(
    schedule: Schedule, mesh: Mesh, cut: Cut, names: set[str]
) -> tuple[Cut, dist.ProcessGroup | None]:
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
            if not name.endswith("router.bias"):  # a buffer, which has no gradient
                sums.append((name, group))
    return Cut(slices, tuple(sums)), group if schedule.directions == 2 else None


def _is_tied(cut: Cut) -> bool:
    return "head.weight" not in cut.slices


def _units(stages: list[Objective]) -> Units:
    blocks: list[nn.Module] = []
    experts: list[nn.Module] = []
    for stage in stages:
        decoder = stage.decoder
        for index in decoder.here:
            block = decoder.layers[index]
            blocks.append(block)
            experts += [m for n, m in block.named_modules() if n.endswith(".experts")]
    has_experts = stages[0].decoder.config.moe is not None
    return Units(tuple(experts), tuple(blocks), tuple(stages), has_experts)


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
