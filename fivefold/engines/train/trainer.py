"""The training loop: step, record, evaluate, save; until the last step or a request to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.axes.parallel import ParallelModel
from fivefold.axes.part import Part
from fivefold.axes.pp.record import to_numbers
from fivefold.core.config import RunConfig
from fivefold.core.errors import TrainingError
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.engines.train.data.loader import Loader
from fivefold.engines.train.model_source import FirstValue
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.engines.train.process import Process
from fivefold.engines.train.recorder import Recorder, expert_metrics
from fivefold.engines.train.schedule import learning_rate
from fivefold.engines.train.step import NotFiniteError, StepResult, TrainStep
from fivefold.engines.train.stop import StopRequest
from fivefold.precision.loss_scaler import DynamicLossScaler


@dataclass
class Position:
    """How far the run is. Saved in every checkpoint."""

    step: int = 0  # optimizer steps done
    consumed: int = 0  # sequences read, over all ranks
    tokens: int = 0  # target tokens trained on, over all ranks
    best_loss: float | None = None  # lowest held-out loss so far


class Trainer:
    """Owns the state of one run and drives it."""

    def __init__(
        self,
        config: RunConfig,
        process: Process,
        model: ParallelModel,
        values: FirstValue,
        loader: Loader,
        held_out: Loader | None,
        checkpointer: Checkpointer,
        recorder: Recorder,
    ) -> None:
        self.config = config
        self.process = process
        self.model = model
        self.values = values
        self.loader = loader
        self.held_out = held_out
        self.checkpointer = checkpointer
        self.recorder = recorder
        self.position = Position()
        self.optimizer = MasterOptimizer(model.masters(), model.gradients, config.optimizer)
        fp16 = config.precision.dtype == "fp16"
        self.scaler = DynamicLossScaler(config.precision.loss_scale) if fp16 else None
        self.step = TrainStep(
            model, self.optimizer, self.scaler, config.train.clip_norm, process.device
        )

    def resume_or_start(self) -> bool:
        """Load the latest checkpoint, or the first values if there is none; True if resumed."""
        latest = self.checkpointer.latest()
        if latest is None:
            self.model.fill(self.values)
            return False
        loaded = self.checkpointer.load(latest, self._state())
        self.position = Position(**loaded.scalars["position"])
        self.optimizer.load_scalars(loaded.scalars["optimizer"])
        if self.scaler is not None and loaded.scalars["scaler"] is not None:
            self.scaler.load_state_dict(loaded.scalars["scaler"])
        self._restore_rng(loaded.rank_tensors)
        self._restore_carried(loaded.rank_tensors)
        self.model.publish()
        return True

    def run(self, stop: StopRequest) -> bool:
        """Train to the configured number of steps, or until `stop`; save at the end either way.

        Returns whether all steps are done.

        Raises TrainingError when the loss or gradient is not finite: the step's record is
        written, and the last checkpoint stays the last good one.
        """
        steps = self.config.train.steps
        asked = False
        while self.position.step < steps and not asked:
            asked = self._one_step(bool(stop))
            done = self.position.step >= steps
            evaluated = self._evaluate() if self._due(self.config.evaluate.every, done) else None
            if self._due(self.config.checkpoint.every, done or asked):
                self._save(evaluated)
        self.checkpointer.wait()
        return self.position.step >= steps

    def _one_step(self, stop: bool) -> bool:
        train = self.config.train
        lr = learning_rate(self.position.step, train.steps, self.config.optimizer)
        started = time.perf_counter()
        batches = self.loader.batches(self.position.consumed, train.global_batch)
        recorded = self.position.step + 1 == self.config.observe.pipeline_step
        if recorded:
            self.model.record_timeline()
        try:
            result = self.step(batches, lr, stop)
        except NotFiniteError as error:
            self._record(error.result, lr, time.perf_counter() - started, self.position.step + 1)
            self.checkpointer.wait()
            raise self._diverged(error) from None
        seconds = time.perf_counter() - started
        self.position.step += 1
        self.position.consumed += train.global_batch
        self.position.tokens += result.targets
        self._record(result, lr, seconds, self.position.step)
        if recorded and (timeline := self.model.timeline()) is not None:
            self.recorder.pipeline(to_numbers(timeline))
        return result.stop_asked

    def _record(self, result: StepResult, lr: float, seconds: float, step: int) -> None:
        extra: dict[str, Any] = {}
        if self.scaler is not None:
            extra = {"loss_scale": self.scaler.scale, "skipped": result.skipped}
        extra |= expert_metrics(self.model.expert_load())
        self.recorder.step(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self.position.tokens,
            step_targets=result.targets,
            seconds=seconds,
            **extra,
        )

    def _diverged(self, error: NotFiniteError) -> TrainingError:
        latest = self.checkpointer.latest()
        kept = (
            f"the last good checkpoint is {latest}" if latest else "no checkpoint was written yet"
        )
        return TrainingError(
            f"step {self.position.step + 1}: the {error.what} is not finite, training stopped "
            f"(its record is in {self.recorder.metrics_path}; {kept})",
            "lower optimizer.lr, lengthen optimizer.warmup or set train.clip_norm",
        )

    def _due(self, every: int, last: bool) -> bool:
        return last or (every > 0 and self.position.step % every == 0)

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Mean held-out loss over the same sequences each time; None without held-out data."""
        if self.held_out is None:
            return None
        batches = self.held_out.batches(0, self.config.evaluate.sequences)
        both = torch.zeros(2, dtype=torch.float64, device=self.process.device)
        both[0] = self.model.evaluate(batches)
        if self.model.counts_sequences:
            both[1] = sum(batch.targets for batch in batches)
        total, targets = self.model.sum(both).tolist()
        loss = total / max(targets, 1.0)
        self.recorder.evaluation(self.position.step, loss)
        return loss

    def _save(self, evaluated: float | None) -> None:
        best = self.position.best_loss
        better = evaluated is not None and (best is None or evaluated < best)
        if better:
            self.position.best_loss = evaluated
        self.checkpointer.save(self._state(), best=better)
        self.recorder.event("checkpoint", step=self.position.step)

    def _state(self) -> TrainState:
        held = self.model.masters() | self.model.buffers()
        masters: dict[str, Part] = {f"model/{name}": part for name, part in held.items()}
        moments = {f"optimizer/{k}": v for k, v in self.optimizer.state_tensors().items()}
        scalars = {
            "position": vars(self.position).copy(),
            "optimizer": self.optimizer.scalars(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }
        return TrainState(
            self.position.step, masters | moments, scalars, self._rng() | self._carried()
        )

    def _carried(self) -> dict[str, torch.Tensor]:
        """Under the layout's name: another one divides otherwise, whatever the shapes say."""
        layout = self.config.layout
        return {f"carried/{layout}/{n}": t for n, t in self.model.carried().items()}

    def _restore_carried(self, saved: dict[str, torch.Tensor]) -> None:
        """Go on with this rank's memories; from nothing where the layout was another."""
        carried = self._carried()
        if all(n in saved and saved[n].shape == t.shape for n, t in carried.items()):
            for name, tensor in carried.items():
                tensor.copy_(saved[name])
        else:
            self.recorder.event("compression memory dropped", step=self.position.step)

    def _rng(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.process.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def _restore_rng(self, states: dict[str, torch.Tensor]) -> None:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.process.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"])
