"""One optimizer step over the micro-batches of this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fivefold.axes.parallel import ParallelModel
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
        model: ParallelModel,
        optimizer: MasterOptimizer,
        scaler: DynamicLossScaler | None,
        clip_norm: float | None,
        device: torch.device,
    ) -> None:
        self.model = model
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
        self.model.reduce()
        if self.scaler is not None:
            self._unscale(self.scaler.scale)
        norm = float(clip_gradients(self.model, self.clip_norm))
        overflow = self.scaler is not None and not math.isfinite(norm)
        result = StepResult(loss, norm, targets, overflow and math.isfinite(loss), stop_asked)
        if not math.isfinite(loss):
            raise NotFiniteError("loss", result)
        if self.scaler is None and not math.isfinite(norm):
            raise NotFiniteError("gradient norm", result)
        if not overflow:
            self.optimizer.step(lr)
            self.model.publish()
        self.model.balance_experts()
        if self.scaler is not None:
            self.scaler.update(overflow)
        self.model.zero_grad()
        return result

    def _agree(self, targets: int, stop: bool) -> tuple[int, bool]:
        own = targets if self.model.counts_sequences else 0
        both = torch.tensor([own, int(stop)], dtype=torch.int64, device=self.device)
        total, asked = self.model.sum(both).tolist()
        return int(total), bool(asked)

    def _accumulate(self, batches: Sequence[Batch], targets: int) -> float:
        scale = (self.scaler.scale if self.scaler else 1.0) / max(targets, 1)
        share = self.model.accumulate(batches, scale)
        return float(self.model.sum(share)) / max(targets, 1)

    def _unscale(self, scale: float) -> None:
        torch._foreach_mul_(list(self.model.gradients().values()), 1.0 / scale)
