"""Measured training steps that were published, as cases that can be predicted.

- `SC21`: Narayanan et al. 2021 (2104.04473), table 1; `KORTHIKANTI`: Korthikanti et al. 2022 (2205.05198),
  table 5. A100-80GB on Selene: one port of 200 Gb/s for each device.
- `VTRAIN`: every 36th row of vTrain's (2312.12391) single-node and every fourth of its multi-node times
  (github.com/VIA-Research/vTrain): Megatron-DeepSpeed, four ports of 200 Gb/s for eight A100-80GB. `vtrain`
  reads the whole files. Multi-node rows recompute everything. Single-node rows do not: from hidden size 1024
  to 2048 a layer of 4096 tokens takes 3.9 ms more for 0.93 TFLOP forward and backward; with a
  second forward pass that would be more than the device's peak. Their head has 50,257 words, not padded.
- `LLAMA3`: Llama 3 (2407.21783), table 4, in TFLOP/s of a device.
- `NEMO`: NVIDIA's performance summaries of NeMo 24.07 and Megatron Bridge 25.11 (docs.nvidia.com/nemo),
  dense models in FP8, in tokens a second and device.
- `DEEPSEEK`: DeepSeek-V3 (2412.19437), table 1: 14.8 T tokens in 2.664 M hours of H800.
- `BUBBLES`: Qi et al. 2023 (2401.10241), tables 3 to 5 (`bubbles.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.servers import fabric
from fivefold.plan.models.gpt import gpt
from fivefold.plan.models.parse import shape
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import (
    DEEPSEEK_V3,
    LLAMA_2024,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
)
from fivefold.plan.time.step import step_time
from fivefold.plan.workload import Recompute, Software, Strategy, Training


@dataclass(frozen=True)
class Case:
    """One measured step; `measured` in seconds."""

    table: str
    name: str
    shape: ModelShape
    training: Training
    strategy: Strategy
    cluster: Cluster
    software: Software
    measured: float

    @property
    def predicted(self) -> float:
        """Seconds of the plan's step."""
        found = step_time(self.shape, self.training, self.strategy, self.cluster, self.software)
        return found.total

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def _a100(devices: int, gigabits: float) -> Cluster:
    """Servers of eight A100-80GB with a port of `gigabits` for each."""
    return replace(cluster(f"{max(1, devices // 8)}x8xA100-80GB"), between=fabric(gigabits))


# heads, hidden, layers, tp, pp, devices, global batch, micro-batch, layers of a virtual stage, TFLOP/s
_SC21 = (
    (24, 2304, 24, 1, 1, 32, 512, 16, 0, 137),
    (32, 3072, 30, 2, 1, 64, 512, 16, 0, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 0, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 8, 0, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 0, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 2, 5, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 5, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 1, 3, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 1, 1, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 1, 0, 163),
)
# hidden, layers, heads, tp, pp, virtual stages, devices, global batch, micro-batch, seconds full, selective
_KORTHIKANTI = (
    (6144, 48, 64, 8, 1, 1, 8, 4, 4, 1.42, 1.10),
    (20480, 105, 128, 8, 35, 3, 280, 280, 1, 49.05, 37.83),
)
# devices, global batch, micro-batch, hidden, heads, layers, sequence, tp, dp, pp, milliseconds
_VTRAIN_SINGLE = (
    (8, 64, 8, 2048, 16, 12, 1024, 2, 4, 1, 295.3),
    (8, 16, 1, 1024, 16, 16, 1024, 1, 4, 2, 151.2),
    (8, 8, 2, 1024, 16, 20, 1024, 4, 2, 1, 143.2),
    (8, 128, 1, 2048, 16, 16, 1024, 1, 8, 1, 1029.0),
    (4, 2, 1, 1024, 16, 24, 1024, 2, 1, 2, 128.7),
    (4, 16, 2, 2048, 16, 16, 1024, 1, 2, 2, 281.2),
    (2, 32, 1, 2048, 16, 16, 1024, 1, 2, 1, 1030.3),
    (8, 4, 1, 1024, 16, 12, 1024, 1, 2, 4, 61.8),
    (8, 16, 1, 1024, 16, 12, 1024, 2, 1, 4, 236.6),
    (8, 8, 2, 2048, 16, 24, 1024, 4, 2, 1, 151.7),
    (8, 32, 2, 2048, 16, 16, 1024, 2, 4, 1, 334.7),
    (8, 16, 2, 2048, 16, 16, 1024, 2, 2, 2, 215.3),
    (4, 16, 4, 1024, 16, 20, 1024, 1, 1, 4, 254.3),
    (4, 2, 1, 1024, 16, 20, 1024, 4, 1, 1, 145.6),
    (4, 16, 1, 2048, 16, 24, 1024, 2, 1, 2, 760.1),
    (2, 4, 1, 1024, 16, 20, 1024, 1, 1, 2, 179.5),
    (4, 16, 1, 2048, 16, 12, 1024, 2, 1, 2, 410.0),
    (4, 32, 4, 2048, 16, 24, 1024, 2, 2, 1, 652.3),
    (4, 16, 1, 2048, 16, 24, 1024, 2, 2, 1, 705.4),
    (8, 32, 1, 1024, 16, 20, 1024, 1, 2, 4, 390.4),
)
_VTRAIN_MULTI = (
    (256, 1024, 8, 6144, 48, 40, 2048, 4, 32, 2, 10856.3),
    (512, 1536, 3, 8192, 64, 48, 2048, 4, 8, 16, 15023.9),
    (512, 1536, 2, 8192, 64, 48, 2048, 8, 16, 4, 14713.4),
    (512, 1536, 4, 12288, 96, 96, 2048, 4, 4, 32, 59333.2),
    (512, 1536, 2, 8192, 64, 48, 2048, 4, 8, 16, 14529.6),
    (512, 1536, 2, 8192, 64, 48, 2048, 2, 16, 16, 23747.9),
    (512, 1536, 3, 8192, 64, 48, 2048, 4, 32, 4, 16185.5),
    (512, 1536, 2, 12288, 96, 96, 2048, 8, 2, 32, 58555.4),
    (512, 1536, 6, 8192, 64, 48, 2048, 4, 32, 4, 18532.1),
    (256, 1024, 4, 6144, 48, 40, 2048, 1, 32, 8, 12379.0),
    (64, 512, 4, 3072, 32, 30, 2048, 8, 8, 1, 5618.0),
    (512, 1536, 6, 8192, 64, 48, 2048, 8, 32, 2, 14915.5),
    (512, 1536, 2, 8192, 64, 48, 2048, 8, 32, 2, 14614.0),
    (64, 512, 2, 3072, 32, 30, 2048, 1, 64, 1, 3700.5),
)
# devices, cp, dp, sequence, sequences of a data rank, TFLOP/s
_LLAMA3 = (
    (8192, 1, 64, 8192, 32, 430),
    (16384, 1, 128, 8192, 16, 400),
    (16384, 16, 8, 131072, 16, 380),
)
# model, device, devices, global batch, micro-batch, sequence, tp, pp, cp, virtual stages, FSDP, tokens/s
_NEMO = (
    ("gpt3-175b", "H100", 128, 256, 1, 2048, 4, 8, 1, 6, False, 726),
    ("gpt3-175b", "H100", 512, 2048, 2, 2048, 4, 8, 1, 6, False, 782),
    ("llama2-7b", "H100", 8, 128, 1, 4096, 1, 1, 1, 1, False, 16_847),
    ("llama2-13b", "H100", 16, 128, 1, 4096, 1, 4, 1, 10, False, 8646),
    ("llama2-70b", "H100", 64, 128, 1, 4096, 4, 4, 1, 20, False, 1707),
    ("llama3.1-8b", "H100", 8, 128, 1, 8192, 1, 1, 2, 1, False, 12_036),
    ("llama3.1-70b", "H100", 64, 128, 1, 8192, 4, 4, 2, 5, False, 1533),
    ("llama3.1-8b", "H100", 8, 128, 1, 8192, 1, 1, 1, 1, True, 14_451),
    ("llama3.1-70b", "H100", 64, 128, 1, 8192, 4, 8, 1, 5, False, 1602),
    ("llama3.1-405b", "H100", 1024, 512, 1, 8192, 8, 8, 2, 8, False, 292),
    ("llama3.1-8b", "B200", 8, 128, 2, 8192, 1, 1, 1, 1, False, 30_624),
    ("llama3.1-8b", "GB200", 8, 128, 2, 8192, 1, 1, 1, 1, False, 31_508),
    ("llama3.1-70b", "GB200", 64, 256, 2, 8192, 1, 1, 1, 1, True, 4312),
)
_VTRAIN_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers",
    "sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism",
    "iteration time (ms)",
)  # fmt: skip


def _megatron(tp: int, pp: int, devices: int, virtual: int, parallel: bool = False) -> Layout:
    return Layout(
        tp=tp, pp=pp, dp_replicate=devices // (tp * pp), sequence_parallel=parallel,
        schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual,
    )  # fmt: skip


def sc21() -> list[Case]:
    """The paper says TFLOP/s of its own count of operations (equation 3), all recomputed."""
    found = []
    for heads, hidden, layers, tp, pp, devices, batch, micro, few, rate in _SC21:
        virtual = layers // (pp * few) if few else 1
        model = gpt(f"{hidden} x {layers}", layers, hidden, heads)
        flops = 96.0 * batch * 2048 * layers * hidden**2
        flops *= 1 + 2048 / (6 * hidden) + 51_200 / (16 * layers * hidden)
        found.append(
            Case(
                "SC21", f"{model.name}, {devices} devices, tp={tp} pp={pp}", model,
                Training(2048, batch, compute="fp16"),
                Strategy(_megatron(tp, pp, devices, virtual), micro, "full"),
                _a100(devices, 200), MEGATRON_2021, flops / devices / (rate * 1e12),
            )
        )  # fmt: skip
    return found


def korthikanti() -> list[Case]:
    """22B and 530B, all recomputed; and scores alone, with sequence parallelism."""
    found = []
    for hidden, layers, heads, tp, pp, virtual, devices, batch, micro, *seconds in _KORTHIKANTI:
        model = gpt(f"{hidden} x {layers}", layers, hidden, heads)
        modes: tuple[Recompute, ...] = ("full", "selective")
        for mode, measured in zip(modes, seconds, strict=True):
            layout = _megatron(tp, pp, devices, virtual, mode == "selective")
            found.append(
                Case(
                    "Korthikanti", f"{model.name}, {devices} devices, {mode}", model,
                    Training(2048, batch, compute="fp16"), Strategy(layout, micro, mode),
                    _a100(devices, 200), MEGATRON_2022, measured,
                )
            )  # fmt: skip
    return found


def vtrain(single: bool, path: Path | None = None) -> list[Case]:
    """Rows of one of vTrain's tables, the embedded ones or a whole file's, of those whose ways make
    up the devices.
    """
    rows: Iterable[tuple[float, ...]] = _VTRAIN_SINGLE if single else _VTRAIN_MULTI
    if path is not None:
        with path.open(newline="") as file:
            rows = [_row(line) for line in csv.DictReader(file)]
    return [_vtrain(row, single) for row in rows if row[7] * row[8] * row[9] == row[0]]


def _row(line: Mapping[str, str]) -> tuple[float, ...]:
    return tuple(float(line[name]) for name in _VTRAIN_COLUMNS)


def _vtrain(row: tuple[float, ...], single: bool) -> Case:
    devices, batch, micro, hidden, heads, layers, sequence, tp, dp, pp = map(int, row[:10])
    padded = -(-50_257 // (128 * tp)) * 128 * tp
    words = 50_257 // tp * tp if single else padded
    model = gpt(f"{hidden} x {layers}", layers, hidden, heads, vocabulary=words, positions=sequence)
    layout = Layout(tp=tp, pp=pp, dp_replicate=dp, sequence_parallel=False)
    return Case(
        "vTrain, one node" if single else "vTrain, many nodes",
        f"{model.name}, tp={tp} dp={dp} pp={pp}, micro-batch {micro} of {batch}", model,
        Training(sequence, batch, compute="fp16"),
        Strategy(layout, micro, "none" if single else "full"),
        _a100(devices, 100), MEGATRON_DEEPSPEED, row[10] / 1e3,
    )  # fmt: skip


def llama3() -> list[Case]:
    """405B; four stages a rank, the first and the last with a layer less (section 3.3.2)."""
    found = []
    model = shape("llama3.1-405b")
    for devices, cp, dp, sequence, each, rate in _LLAMA3:
        layout = Layout(
            tp=8, cp=cp, pp=16, dp_shard=dp, zero=1, schedule="interleaved", virtual=4,
            stage_layers=(1, *(2,) * 62, 1), cp_kind="gather",
        )  # fmt: skip
        training, strategy = Training(sequence, each * dp), Strategy(layout, 1)
        machines = cluster(f"{devices // 8}x8xH100")
        step = step_time(model, training, strategy, machines, LLAMA_2024)
        found.append(
            Case(
                "Llama 3", f"405B, {devices} devices, {sequence} tokens", model, training, strategy,
                machines, LLAMA_2024, step.total * step.flops_per_device / (rate * 1e12),
            )
        )  # fmt: skip
    return found


def nemo() -> list[Case]:
    """Its recipes' layouts."""
    found = []
    for name, device, devices, batch, micro, sequence, tp, pp, cp, virtual, fsdp, rate in _NEMO:
        layout = Layout(
            tp=tp, pp=pp, cp=cp, dp_shard=devices // (tp * pp * cp), zero=3 if fsdp else 1,
            schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual,
        )  # fmt: skip
        per_node = 4 if device == "GB200" else 8
        found.append(
            Case(
                "NeMo", f"{name}, {devices} {device}, tp={tp} pp={pp} cp={cp}", shape(name),
                Training(sequence, batch, compute="fp8"), Strategy(layout, micro),
                cluster(f"{devices // per_node}x{per_node}x{device}"), MEGATRON_CORE,
                batch * sequence / (rate * devices),
            )
        )  # fmt: skip
    return found


def deepseek() -> list[Case]:
    """The whole pre-training, with all that happened in it; sequences of 4,096 in batches of 15,360."""
    layout = Layout(pp=16, dp_shard=128, ep=64, zero=1, schedule="dualpipe")
    training = Training(4096, 15_360, compute="fp8")
    return [
        Case(
            "DeepSeek-V3", "2,048 H800, pp=16 ep=64", shape("deepseek-v3"), training,
            Strategy(layout, 1, "selective"), cluster("256x8xH800"), DEEPSEEK_V3,
            15_360 * 4096 / (14.8e12 / (2.664e6 * 3600) * 2048),
        )
    ]  # fmt: skip


def mean_error(cases: Iterable[Case]) -> float:
    """Mean of absolute errors."""
    errors = [abs(case.error) for case in cases]
    return sum(errors) / len(errors)


def worst_error(cases: Iterable[Case]) -> float:
    """The largest absolute error."""
    return max(abs(case.error) for case in cases)
