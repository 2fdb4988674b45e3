"""What a run leaves behind and shows while it goes: metrics, events, progress, at the end a report.

Only rank 0 writes. Every rank calls, since measuring memory and the peak concerns all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fivefold.core.config import RunConfig
from fivefold.engines.train.process import Process
from fivefold.engines.train.run_directory import RunDirectory
from fivefold.model.config import ModelConfig
from fivefold.model.counting import active_elements
from fivefold.observe.flops import DecoderShape, training_flops_per_token
from fivefold.observe.hardware import describe_hardware
from fivefold.observe.memory import memory_bytes
from fivefold.observe.metrics import MetricsWriter
from fivefold.observe.peak import measured_peak
from fivefold.observe.progress import TrainProgress
from fivefold.observe.report import write_report


class Recorder:
    """Turns step results into metrics.jsonl, TensorBoard events and the progress line."""

    def __init__(
        self, config: RunConfig, model: ModelConfig, process: Process, directory: RunDirectory
    ) -> None:
        self.config = config
        self.process = process
        self.directory = directory
        self.metrics_path = directory.path / "metrics.jsonl"
        self._flops = training_flops_per_token(decoder_shape(model), config.data.sequence_length)
        self._peak: float | None = None
        self._writer: MetricsWriter | None = None
        self._progress: TrainProgress | None = None

    @contextmanager
    def running(self, first_step: int, resumed: bool) -> Iterator[None]:
        """Open the records; drop those of steps after `first_step`, which will be run again."""
        if self.config.observe.mfu:
            self._peak = self.process.on_main(self._measure_peak)
        if not self.process.ranks.is_main:
            yield
            return
        self.event(
            "resume" if resumed else "start",
            step=first_step,
            layout=str(self.config.layout),
            hardware=describe_hardware(self.process.device.type),
        )
        try:
            with (
                MetricsWriter(
                    self.directory.path, tensorboard=self.config.observe.tensorboard
                ) as self._writer,
                TrainProgress(
                    self.config.train.steps, enabled=self.config.observe.progress
                ) as self._progress,
            ):
                self._writer.truncate_after(first_step)
                yield
        finally:  # a run that diverged or was interrupted is the one whose report is wanted most
            self.event("stop")
            write_report(self.directory.path)

    def step(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_targets: int,
        seconds: float,
        **extra: Any,
    ) -> None:
        """Record one optimizer step. `tokens` counts from the run's start, `seconds` is wall time."""
        if self._writer is None or self._progress is None:
            return
        read = self.config.train.global_batch * self.config.data.sequence_length
        rate = read / seconds
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_second": rate,
            "mfu": rate * self._flops / self._peak if self._peak else None,
            "step_seconds": seconds,
            "memory_bytes": memory_bytes(self.process.device.type),
            "targets": step_targets,
            **extra,
        }
        self._writer.write(row)
        self._progress.update(row)

    def evaluation(self, step: int, loss: float) -> None:
        """Record a held-out loss."""
        if self._writer is None or self._progress is None:
            return
        self._writer.write_evaluation(step, loss)
        self._progress.note(f"step {step}: held-out loss {loss:.4f}")

    def pipeline(self, timeline: dict[str, Any]) -> None:
        """Write the measured times of a pipeline step; `fivefold plan schedule` draws them."""
        if self.process.ranks.is_main:
            path = self.directory.path / "pipeline.json"
            path.write_text(json.dumps(timeline, indent=1), "utf-8")

    def event(self, name: str, **details: Any) -> None:
        """Record a start, resume, checkpoint or stop (rank 0)."""
        if self.process.ranks.is_main:
            self.directory.record(name, **details)

    def _measure_peak(self) -> float:
        """FLOP/s of all ranks together, from one rank's measured GEMM peak."""
        peak = measured_peak(self.process.device.type, self.config.precision.dtype)
        return peak.flops_per_second * self.process.ranks.world_size


def expert_metrics(layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The load of experts in one step: the worst layer's numbers, and `experts` with each layer's."""
    if not layers:
        return {}
    return {
        "expert_max_over_mean": max(load["max_over_mean"] for load in layers.values()),
        "expert_entropy": min(load["entropy"] for load in layers.values()),
        "expert_dropped": sum(load["dropped"] for load in layers.values()),
        "experts": layers,
    }


def decoder_shape(model: ModelConfig) -> DecoderShape:
    """The numbers of a decoder that its FLOPs depend on."""
    return DecoderShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        windows=model.windows,
        value_dim=model.value_dim,
        elements=active_elements(model),
    )
