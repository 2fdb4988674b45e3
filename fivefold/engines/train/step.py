"""One optimizer step over the micro-batches of this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.axes.dp.protocol import DataAxis
from fivefold.core.errors import TrainingError
from fivefold.engines.train.clip import clip_gradients
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.precision.loss_scaler import DynamicLossScaler


@dataclass(frozen=True)
class StepResult:
    """What one step did. `loss` is the mean over the global batch's targets, in nats."""

    loss: float
    grad_norm: float
    targets: int
    skipped: bool  # fp16 only: the scaled gradient overflowed and no update was made
    stop_asked: bool  # some rank was asked to stop


class NotFiniteError(TrainingError):
    """The loss or gradient is NaN or infinite; no update was made. Carries the step's result."""

    def __init__(self, what: str, result: StepResult) -> None:
        super().__init__(f"the {what} is not finite")
        self.what = what
        self.result = result


class TrainStep:
    """Forward, backward, reduce, clip, update: in this order, once per global batch."""

    def __init__(
        self,
        axis: DataAxis,
        optimizer: MasterOptimizer,
        scaler: DynamicLossScaler | None,
        clip_norm: float | None,
        device: torch.device,
    ) -> None:
        self.axis = axis
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.device = device

    def __call__(self, batches: Sequence[Batch], lr: float, stop: bool = False) -> StepResult:
        """Take one step at learning rate `lr`.

        The loss is divided by the true number of targets over all ranks and micro-batches, so
        neither padding nor the split into ranks changes it. `stop` asks all ranks to stop after
        this step. Raises NotFiniteError, on every rank alike, before anything was updated.
        """
        targets, stop_asked = self._agree(sum(b.targets for b in batches), stop)
        loss = self._accumulate(batches, targets)
        self.axis.reduce()
        if self.scaler is not None:
            self._unscale(self.scaler.scale)
        norm = float(clip_gradients(self.axis, self.clip_norm))
        overflow = self.scaler is not None and not math.isfinite(norm)
        result = StepResult(loss, norm, targets, overflow and math.isfinite(loss), stop_asked)
        if not math.isfinite(loss):
            raise NotFiniteError("loss", result)
        if self.scaler is None and not math.isfinite(norm):
            raise NotFiniteError("gradient norm", result)
        if not overflow:
            self.optimizer.step(lr)
            self.axis.publish()
        if self.scaler is not None:
            self.scaler.update(overflow)
        self.axis.zero_grad()
        return result

    def _agree(self, targets: int, stop: bool) -> tuple[int, bool]:
        both = torch.tensor([targets, int(stop)], dtype=torch.int64, device=self.device)
        total, asked = self.axis.sum(both).tolist()
        return int(total), bool(asked)

    def _accumulate(self, batches: Sequence[Batch], targets: int) -> float:
        scale = (self.scaler.scale if self.scaler else 1.0) / max(targets, 1)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for index, batch in enumerate(batches):
            self.axis.begin(last=index == len(batches) - 1)
            loss = forward(self.axis, batch, self.device)
            (loss * scale).backward()
            total += loss.detach()
        return float(self.axis.sum(total)) / max(targets, 1)

    def _unscale(self, scale: float) -> None:
        torch._foreach_mul_(list(self.axis.gradients().values()), 1.0 / scale)


def forward(axis: DataAxis, batch: Batch, device: torch.device) -> Tensor:
    """Loss sum of one micro-batch on `device`."""
    documents = None if batch.documents is None else batch.documents.to(device)
    return axis.module(
        batch.tokens.to(device), batch.labels.to(device), batch.positions.to(device), documents
    )
