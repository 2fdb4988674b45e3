"""Which runner takes a step's micro-batches through the model, and how they are divided."""

from __future__ import annotations

# B batch, S sequence, D hidden
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.axes.cp.axis import ContextAxis
from fivefold.axes.cp.groups import context_groups
from fivefold.axes.cp.split import ContextSplit
from fivefold.axes.divided import Depth
from fivefold.axes.dp.protocol import DataAxis, decoder_name
from fivefold.axes.mesh import Mesh
from fivefold.axes.microbatches import Inputs, InTurn, MicroBatches
from fivefold.axes.parallel import Divide, Rows, whole
from fivefold.axes.pp.action import Action
from fivefold.axes.pp.build import build_schedule, placement_of
from fivefold.axes.pp.measured import measured_timeline
from fivefold.axes.pp.runtime import PipelineRuntime
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.timeline import Timeline
from fivefold.core.layout import Layout
from fivefold.model.attention_backend import AttentionBackend
from fivefold.model.objective import Objective


def make_runner(
    depth: Depth,
    axis: DataAxis,
    layout: Layout,
    mesh: Mesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> MicroBatches:
    """One micro-batch after the other, or as the pipeline's schedule says."""
    if layout.pp > 1:
        assert mesh is not None
        return PipelineRunner(depth, axis, layout, mesh, device, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return InTurn(axis, depth.stages[0], lambda: torch.zeros((), dtype=wide, device=device))


def divide_sequences(objective: Objective, layout: Layout, mesh: Mesh | None) -> Divide:
    """How a micro-batch's rows are divided over context ranks; the objective attends over all."""
    if mesh is None or layout.cp == 1:
        return whole
    rank, _ = mesh.place(("cp",))
    groups = context_groups(mesh.ranks(("cp",)), layout.ulysses)
    axis = ContextAxis(ContextSplit.of(layout, rank), *groups, layout.cp_kind)
    objective.attend = partial(_attend, axis)

    def divide(batch: Rows) -> Inputs:
        part = axis.split(batch.tokens, batch.labels, batch.positions, batch.documents)
        return Inputs(part.tokens, part.labels, part.positions, part.documents, part.places)

    return divide


def _attend(axis: ContextAxis, documents: Tensor | None, places: Tensor | None) -> AttentionBackend:
    assert places is not None, "rows are divided"
    return axis.attention(documents, places)


class StageChunk:
    """One stage with the micro-batches of the step, as the runtime asks for them."""

    def __init__(self, module: Objective, layout: Layout, dtype: torch.dtype) -> None:
        self.module: nn.Module = module
        self._width = module.decoder.config.hidden_size
        self.batches: Sequence[Inputs] = ()
        self._ways = layout.tp if layout.sequence_parallel else 1
        self._dtype = dtype

    def forward(self, hidden: Tensor | None, index: int) -> Tensor:
        """Hidden states for the next stage, or the loss SUM."""
        return self.module(*self.batches[index].arguments(), hidden=hidden)

    def hidden(self, index: int) -> tuple[torch.Size, torch.dtype]:
        """[B,S,D] of what comes in, S divided by tensor ranks that divide sequences."""
        rows, length = self.batches[index].tokens.shape
        return torch.Size((rows, length // self._ways, self._width)), self._dtype

    def begin_backward(self, index: int, last: bool) -> None:
        """Nothing: gradients travel when all micro-batches are done."""


class PipelineRunner:
    """Runs a step as the layout's schedule says."""

    def __init__(
        self,
        depth: Depth,
        axis: DataAxis,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._axis, self._layout, self._device = axis, layout, device
        self._rank, _ = mesh.place(("pp",))
        self._group = mesh.group(("pp",))
        self._chunks = {
            stage: StageChunk(module, layout, dtype) for stage, module in depth.stages.items()
        }
        self._training: dict[int, PipelineRuntime] = {}
        self._evaluating: dict[int, PipelineRuntime] = {}
        self._record = False
        self._recorded: PipelineRuntime | None = None

    def accumulate(self, batches: Sequence[Inputs], scale: float) -> Tensor:
        """Forward and backward of all, and the loss SUM where this rank has the last stage."""
        count = len(batches)
        if count not in self._training:
            virtual = self._layout.virtual if self._layout.virtual > 1 else None
            schedule = build_schedule(self._layout.schedule, self._layout.pp, count, virtual)
            # One at a time: a runtime that postpones weight gradients takes the projections over.
            self._training = {count: self._runtime(schedule)}
        self._hand_out(batches)
        runtime = self._training[count]
        if self._record:
            self._recorded = runtime
        runtime.record, self._record = self._record, False
        self._axis.begin(last=True, times=self._times(runtime.schedule))
        return runtime.run(scale)

    def record(self) -> None:
        """Take the times of each action in the next `accumulate`."""
        self._record = True

    def timeline(self) -> Timeline | None:
        """All ranks' times of the recorded step. Collective."""
        if self._recorded is None:
            return None
        return measured_timeline(self._recorded, self._group)

    def evaluate(self, batches: Sequence[Inputs]) -> Tensor:
        """Forward of all."""
        count = len(batches)
        if count not in self._evaluating:
            schedule = forward_only(placement_of(self._layout), count)
            self._evaluating[count] = self._runtime(schedule)
        self._hand_out(batches)
        return self._evaluating[count].evaluate()

    def _times(self, schedule: Schedule) -> dict[str, int]:
        """How many gradients of each parameter a step brings: one a stage and micro-batch."""
        found: dict[str, int] = {}
        for stage, chunk in self._chunks.items():
            for name, _ in chunk.module.named_parameters():
                name = decoder_name(name)
                found[name] = found.get(name, 0) + len(schedule.microbatches_of(stage))
        return found

    def _hand_out(self, batches: Sequence[Inputs]) -> None:
        for chunk in self._chunks.values():
            chunk.batches = batches

    def _runtime(self, schedule: Schedule) -> PipelineRuntime:
        return PipelineRuntime(schedule, self._rank, self._group, self._chunks, self._device)


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The same stages, each passed by every micro-batch once, without backward."""
    found = replace(schedule, microbatches=microbatches)
    orders = tuple(
        tuple(
            Action("F", stage, index)
            for stage in found.held(rank)
            for index in found.microbatches_of(stage)
        )
        for rank in range(found.ranks)
    )
    return replace(found, orders=orders)
