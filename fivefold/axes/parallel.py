"""A model on all axes, as the training step sees it: one object, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.dp.protocol import DataAxis
from fivefold.axes.mesh import WIDTH, Mesh, all_reduced
from fivefold.axes.microbatches import Inputs, MicroBatches
from fivefold.axes.part import Part
from fivefold.axes.pp.timeline import Timeline
from fivefold.model.balance import Balance


class Rows(Protocol):
    """What is needed of a micro-batch: [B,S] int64 tensors (see `engines.train.data.batch`)."""

    @property
    def tokens(self) -> Tensor:
        """Token ids."""

    @property
    def labels(self) -> Tensor:
        """What each token should predict; -100 for nothing."""

    @property
    def positions(self) -> Tensor:
        """From 0 in every document."""

    @property
    def documents(self) -> Tensor | None:
        """The document of each token."""


Divide = Callable[[Rows], Inputs]


def whole(batch: Rows) -> Inputs:
    """Sequences that are not divided."""
    return Inputs(batch.tokens, batch.labels, batch.positions, batch.documents)


class ParallelModel:
    """Masters, gradients and losses of one model over all ranks of a layout.

    Losses and squares are kept as shares: numbers that add up to the global one over ALL ranks,
    because each is counted by exactly one rank of those that know it. `sum` adds them.
    """

    def __init__(
        self,
        axis: DataAxis,
        runner: MicroBatches,
        mesh: Mesh | None,
        device: torch.device,
        balance: Balance,
        buffers: Mapping[str, Part],
        *,
        twin: dist.ProcessGroup | None = None,
        divide: Divide = whole,
    ) -> None:
        self.axis = axis
        self.runner = runner
        self.mesh = mesh
        self.device = device
        self._balance = balance
        self._buffers = dict(buffers)
        self._twin = twin
        self._divide = divide
        # One rank counts the sequences of a replica, and one tensor rank the loss of a shard.
        self.counts_sequences = mesh is None or not any(
            mesh.place((name,))[0] for name in ("pp", "cp", "tp")
        )
        self._counts_loss = mesh is None or mesh.place(("tp",))[0] == 0

    @property
    def module(self) -> nn.Module:
        """All that this rank computes with."""
        return self.axis.module

    def masters(self) -> dict[str, Part]:
        """What this rank holds of each fp32 parameter."""
        return self.axis.masters()

    def gradients(self) -> dict[str, Tensor]:
        """fp32 gradients of the masters; valid after `reduce`."""
        return self.axis.gradients()

    def accumulate(self, batches: Sequence[Rows], scale: float) -> Tensor:
        """Add the gradients of scale * loss over the step's micro-batches; this rank's share of
        the loss SUM."""
        self._balance.scale = scale
        return self._share(self.runner.accumulate([self._inputs(b) for b in batches], scale))

    def evaluate(self, batches: Sequence[Rows]) -> Tensor:
        """This rank's share of the loss SUM, without gradients."""
        return self._share(self.runner.evaluate([self._inputs(b) for b in batches]))

    def record_timeline(self) -> None:
        """Take the times of each action in the next `accumulate`; see `timeline`."""
        self.runner.record()

    def timeline(self) -> Timeline | None:
        """Of the whole pipeline in the step that was recorded; None without one. Collective."""
        return self.runner.timeline()

    def reduce(self) -> None:
        """Wait for communication: gradients are then the SUM over all ranks that compute them."""
        self.axis.reduce()

    def publish(self) -> None:
        """Bring the compute parameters after the masters."""
        self.axis.publish()

    def buffers(self) -> dict[str, Part]:
        """What training changes besides parameters: biases of routers."""
        return dict(self._buffers)

    def balance_experts(self) -> None:
        """End a step: shift the biases of routers towards even load. Collective with experts."""
        self._balance.update(self._sum_same_layers)

    def expert_load(self) -> dict[str, dict[str, object]]:
        """Tokens per expert and what follows from them, of every layer in the last step.

        Collective in a pipeline.
        """
        here = self._balance.statistics()
        group = None if self.mesh is None else self.mesh.group(("pp",))
        if group is None:
            return here
        stages: list[dict[str, dict[str, object]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(stages, here, group=group)
        return {name: load for stage in stages for name, load in stage.items()}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.axis.zero_grad()

    def carried(self) -> dict[str, Tensor]:
        """What this rank alone carries over from step to step; see `DataAxis.carried`."""
        return self.axis.carried()

    def sum(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares."""
        if self.mesh is None:
            return share
        return all_reduced(share, dist.group.WORLD)

    @torch.no_grad()
    def fill(self, value: Callable[[str, torch.Size], Tensor]) -> None:
        """Set every parameter from its whole value, by name and shape; this rank cuts its part."""
        for name, part in self.masters().items():
            part.values.copy_(part.slice.cut(value(name, part.shape)))
        for name, part in self._buffers.items():
            part.values.copy_(value(name, part.shape))
        self.publish()

    def _sum_same_layers(self, counts: Tensor) -> Tensor:
        width = None if self.mesh is None else self.mesh.group(WIDTH)
        return all_reduced(all_reduced(counts, width), self._twin)

    def _inputs(self, batch: Rows) -> Inputs:
        inputs = self._divide(batch)
        return Inputs(*(None if x is None else x.to(self.device) for x in inputs.arguments()))  # type: ignore[arg-type]

    def _share(self, loss: Tensor) -> Tensor:
        return loss if self._counts_loss else torch.zeros_like(loss)
