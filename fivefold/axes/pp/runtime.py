"""Running one global batch through a pipeline: this rank's part of the schedule, as it is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.chunk import Chunk
from fivefold.axes.pp.program import Transfer, programs
from fivefold.axes.pp.schedule import Schedule, Value
from fivefold.axes.pp.timeline import Span
from fivefold.axes.pp.weight_gradients import WeightGradients
from fivefold.axes.pp.wire import Arrival, Wire
from fivefold.core.errors import LayoutError


class _Pending(NamedTuple):
    """Between the forward and the backward of one stage for one micro-batch.

    Of the output only its place in the graph is kept: the data is not needed once it is sent.
    """

    input: Tensor | None
    output: GradientEdge
    shape: torch.Size
    dtype: torch.dtype


class PipelineRuntime:
    """Executes `schedule.orders[rank]` over this rank's `chunks` (by stage).

    `group` is the pipeline's process group, whose rank r is pipeline rank r (None for one rank).
    With `record`, `spans` holds the measured times of the last batch, in seconds of the clock. Raises LayoutError unless the
    chunks are the stages of this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        group: dist.ProcessGroup | None,
        chunks: Mapping[int, Chunk],
        device: torch.device,
        *,
        record: bool = False,
    ) -> None:
        if tuple(sorted(chunks)) != schedule.held(rank):
            raise LayoutError(
                f"rank {rank} of schedule {schedule.name} was given stages {sorted(chunks)}",
                f"give it {list(schedule.held(rank))}",
            )
        self.schedule, self.rank, self.chunks = schedule, rank, chunks
        self.record = record
        self.spans: list[Span] = []
        self._device = device
        self._program = programs(schedule)[rank]
        self._wire = Wire(group, device)
        order = schedule.orders[rank]
        self._postponed = {action for action in order if action.kind == "W"}
        split = {action.stage for action in self._postponed}
        self._weights = {stage: WeightGradients(chunks[stage].module) for stage in split}
        self._last = {a.stage: a for a in order if a.kind == "B" and a.stage not in split}
        self._begin(0.0)

    def run(self, scale: float) -> Tensor:
        """Forward and backward of all micro-batches; gradients of `scale` times the loss accumulate.

        Returns the sum of the losses, unscaled, in fp64: zero on ranks without a last stage, so that
        the sum over ranks is the loss of the batch. Raises TrainingError if another rank is lost.
        """
        self._begin(scale)
        for step in self._program:
            if isinstance(step, Transfer):
                self._transfer(step)
            else:
                self._timed(step)
        self._wire.finish()
        return self._loss

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Forward of all micro-batches; the sum of the losses as `run` gives it."""
        self._begin(0.0)
        for step in self._program:
            # What is left of one line of events is one: see program.py.
            if isinstance(step, Transfer) and step.action.kind == "F":
                self._transfer(step)
            elif isinstance(step, Action) and step.kind == "F":
                self._forward(step)
        self._wire.finish()
        self._pending.clear()
        return self._loss

    def _begin(self, scale: float) -> None:
        self._scale = scale
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._values: dict[Value, Tensor | Arrival] = {}  # that come in, or go out
        for weights in self._weights.values():
            weights.attach()
            weights.forget()
        self.spans = []

    def _transfer(self, transfer: Transfer) -> None:
        value = self.schedule.made_by(transfer.action)
        if transfer.source == self.rank:
            tensor = self._values.pop(value)
            assert isinstance(tensor, Tensor)
            self._wire.send(tensor, transfer)
        else:
            shape, dtype = self._announced(transfer)
            self._values[value] = self._wire.receive(shape, dtype, transfer)

    def _announced(self, transfer: Transfer) -> tuple[torch.Size, torch.dtype]:
        """Shape and format of what comes: a gradient has those of the output that it is of."""
        stage, index = transfer.receiver, transfer.action.microbatch
        if transfer.action.kind == "F":
            return self.chunks[stage].hidden(index)
        pending = self._pending[stage, index]
        return pending.shape, pending.dtype

    def _timed(self, action: Action) -> None:
        """One action; its time starts when everything it needs is there."""
        arrived = [
            value
            for value in self.schedule.needed_by(action)
            if isinstance(self._values.get(value), Arrival)
        ]
        for value in arrived:
            arrival = self._values[value]
            assert isinstance(arrival, Arrival)
            self._values[value] = arrival.take()
        if not self.record:
            self._do(action)
            return
        start = self._now()
        self._do(action)
        self.spans.append(Span(self.rank, action, start, self._now()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()  # the one clock that ranks on several machines have in common

    def _do(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._weights[action.stage].deliver(action.microbatch)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        before = self.schedule.preceding(stage)
        hidden = None if before is None else self._taken(("hidden", before, index))
        if hidden is not None and torch.is_grad_enabled():
            hidden = hidden.detach().requires_grad_()
        with self._split(stage, index):
            output = self.chunks[stage].forward(hidden, index)
        if torch.is_grad_enabled():
            edge = get_gradient_edge(output)
            self._pending[stage, index] = _Pending(hidden, edge, output.shape, output.dtype)
        if self.schedule.following(stage) is None:
            self._loss += output.detach()
        else:
            self._values["hidden", stage, index] = output.detach()

    def _backward(self, action: Action) -> None:
        stage, index = action.stage, action.microbatch
        chunk, pending = self.chunks[stage], self._pending.pop((stage, index))
        after = self.schedule.following(stage)
        if after is None:
            grad = torch.full(pending.shape, self._scale, dtype=pending.dtype, device=self._device)
        else:
            grad = self._taken(("gradient", after, index))
        chunk.begin_backward(index, self._last.get(stage) == action)
        with self._split(stage, index):
            torch.autograd.backward([pending.output], [grad])
        if pending.input is not None:
            assert pending.input.grad is not None, "hidden states must be used by the stage"
            self._values["gradient", stage, index] = pending.input.grad

    def _split(self, stage: int, index: int) -> AbstractContextManager[None]:
        """Postpones weight gradients where the schedule has a W for them."""
        if torch.is_grad_enabled() and Action("W", stage, index) in self._postponed:
            return self._weights[stage].postponing(index)
        return nullcontext()

    def _taken(self, value: Value) -> Tensor:
        """A value that came in, or that a neighbouring stage on this rank made; now this one's."""
        found = self._values.pop(value)
        return found.take() if isinstance(found, Arrival) else found
