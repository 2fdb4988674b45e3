"""Measured latencies of serving systems, as cases that can be predicted.

The table is that of ai-dynamo/aiconfigurator's accuracy tracking (Apache-2.0): TTFT and TPOT of
vLLM, SGLang and TensorRT-LLM with their whole configuration. How they were measured:

- The client keeps `batch_size` requests of each attention-DP rank out at once, ten for each user
  one after another. Where answers wait longer than an answer takes, more were out than the table
  says; such rows are predicted as the table has them.
- With 1024 or 8192 tokens in and 1024 out, lengths lie between 0.8 and 1 of those (the client of
  InferenceMAX, `--random-range-ratio 0.8 --num-prompts 10 x concurrency`); else all are equal.
- InferenceMAX starts servers with options that its scripts show: TensorRT-LLM with
  `max_num_tokens` of one prompt and the batch, SGLang with chunks of 32768 on Blackwell.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.core.layout import Layout
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.simulate import simulate
from fivefold.plan.serving.software import SYSTEMS, ServingSoftware
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import Traffic, closed
from fivefold.plan.shape import ModelShape

CLUSTERS: Mapping[str, str] = {
    "h100_sxm": "2x8xH100",
    "h200_sxm": "2x8xH200",
    "b200_sxm": "2x8xB200",
    "b300_sxm": "2x8xB300",
    "gb200": "18x4xGB200",
    "gb300": "18x4xGB300",
}
FORMATS: Mapping[str, str] = {"": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
VARIED = {(1024, 1024), (8192, 1024), (1024, 8192)}
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
FEW_USERS = 64
"""Up to so many, ten requests for each are simulated; of more, as many as three for each."""


@dataclass(frozen=True)
class Case:
    """One measured deployment."""

    id: str
    model: str
    system: str
    deployed: ServingStrategy | Split
    traffic: Traffic
    ttft: float
    tpot: float

    @property
    def cluster(self) -> str:
        """The cluster's words."""
        return CLUSTERS[self.system]


@dataclass(frozen=True)
class Compared:
    """A case with what is predicted for it. Seconds."""

    case: Case
    ttft: float
    tpot: float

    @property
    def ttft_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.ttft / self.case.ttft - 1

    @property
    def tpot_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.tpot / self.case.tpot - 1


def read(path: Path) -> list[Case]:
    """Cases of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return [case(row) for row in csv.DictReader(file)]


def case(row: Mapping[str, str]) -> Case:
    """One row of the table."""
    lengths = int(row["isl"]), int(row["osl"])
    if row["mode"] == "disagg":
        prefill, decode = (_strategy(row, f"{part}_") for part in ("prefill", "decode"))
        deployed: ServingStrategy | Split = Split(
            prefill, int(row["prefill_num_workers"]), decode, int(row["decode_num_workers"])
        )
        users = decode.max_sequences * int(row["decode_num_workers"])
    else:
        deployed = _strategy(row, "")
        users = deployed.max_sequences
    traffic = closed(
        users, *lengths,
        requests=users * 10 if users <= FEW_USERS else users * 3,
        shortest=0.8 if lengths in VARIED else 1.0,
    )  # fmt: skip
    return Case(
        row["id"], row["model_path"], row["system"], deployed, traffic,
        float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3,
    )  # fmt: skip


def compare(
    cases: Iterable[Case],
    shape: Callable[[str], ModelShape],
    cluster: Callable[[str], Cluster],
) -> list[Compared]:
    """Predict each case by simulation."""
    found = []
    for each in cases:
        run = simulate(shape(each.model), each.deployed, cluster(each.cluster), each.traffic)
        latencies = run.summary().latencies
        ttft, tpot = latencies["ttft"], latencies["tpot"]
        assert ttft is not None and tpot is not None
        found.append(Compared(each, ttft.mean, tpot.mean))
    return found


def mean_error(found: Iterable[Compared], name: str) -> float:
    """Mean absolute relative error of `ttft` or `tpot`."""
    errors = [abs(getattr(each, f"{name}_error")) for each in found]
    return sum(errors) / len(errors)


def _strategy(row: Mapping[str, str], part: str) -> ServingStrategy:
    def number(name: str) -> int:
        return max(1, int(row[f"{part}{name}"] or 1))

    tp, data = number("tp_size"), number("attention_dp_size")
    ways = tp * data
    layout = Layout(
        tp=tp,
        pp=number("pp_size"),
        dp_shard=data,
        ep=_experts(number("moe_tp_size"), number("moe_ep_size"), ways),
    )
    weights = FORMATS[row["gemm_quant_mode"]]
    batch = number("batch_size") * data
    return ServingStrategy(
        layout=layout,
        weights=weights,
        experts=FORMATS[row["moe_quant_mode"]],
        kv=_kv(row, weights),
        max_sequences=batch,
        token_budget=_budget(row, batch),
        system=_system(row),
    )


def _experts(tensor: int, expert: int, ways: int) -> int:
    return expert if tensor * expert == ways else 1


def _kv(row: Mapping[str, str], weights: str) -> str:
    """TensorRT-LLM and SGLang on Blackwell are started with FP8 keys and values."""
    narrow = row["backend"] == "trtllm" or (
        row["backend"] == "sglang" and row["system"] in BLACKWELL
    )
    return "fp8" if narrow and weights != "bf16" else "bf16"


def _budget(row: Mapping[str, str], batch: int) -> int | None:
    lengths = int(row["isl"]), int(row["osl"])
    if row["mode"] == "disagg" or lengths not in VARIED:
        return None
    if row["backend"] == "trtllm":
        return -(-(batch + lengths[0] + 64) // 64) * 64
    return 32768 if row["backend"] == "sglang" and row["system"] in BLACKWELL else None


def _system(row: Mapping[str, str]) -> ServingSoftware:
    return replace(SYSTEMS[row["backend"]])
