"""Measured latencies of serving systems, as cases that can be predicted.

The table is that of ai-dynamo/aiconfigurator's accuracy tracking (Apache-2.0): TTFT and TPOT of
vLLM, SGLang and TensorRT-LLM with their whole configuration. How they were measured:

- The client keeps `batch_size` requests of each attention-DP rank out at once, ten for each user
  one after another. Where answers wait longer than an answer takes, more were out than the table
  says; such rows are predicted as the table has them.
- Rows of models that InferenceMAX runs, with 1024 or 8192 tokens in and 1024 out, are its: lengths
  lie between 0.8 and 1 of those (`--random-range-ratio 0.8 --num-prompts 10 x concurrency`), and
  servers are started as its scripts do: TensorRT-LLM with 8192 tokens a step, or a prompt and the
  batch where that is more; vLLM with 16384; SGLang on Blackwell with chunks of 32768 and
  `--scheduler-recv-interval 30` (10 below 16 requests at once).
- The others are aiconfigurator's own: equal lengths, and engines as it generates them, with a
  prompt, the batch and 1500 tokens a step.
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
INFERENCEMAX = ("DeepSeek", "gpt-oss", "Llama-3", "MiniMax", "Kimi", "Qwen3.5", "GLM")
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
CLIENT = 0.05
"""Seconds that InferenceMAX's client adds (Python, a new connection for each request, on the
machine that it measures): the one number here that comes from the table itself."""
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

    @property
    def software(self) -> str:
        """Whose engine it is."""
        deployed = self.deployed
        part = deployed.decode if isinstance(deployed, Split) else deployed
        return part.system.name

    @property
    def is_complete(self) -> bool:
        """Whether as many requests may have been out as the table says.

        Engines that make as many answers at once as requests are out let none wait for a place.
        One that waited longer than an answer takes did so behind others that were out as well.
        """
        return self.ttft < self.tpot * self.traffic.output_tokens


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
        shortest=0.8 if _is_inferencemax(row) else 1.0,
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
        token_budget=_budget(row, part, batch),
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


def _budget(row: Mapping[str, str], part: str, batch: int) -> int:
    """Tokens a step: what the scripts and generators of the two benchmarks set."""
    prompt = int(row["isl"])
    if not _is_inferencemax(row):
        alone = part == "prefill_" or row["backend"] == "sglang"
        return -(-(prompt + 1500 + (0 if alone else batch)) // 32) * 32
    if row["backend"] == "trtllm":
        return max(8192, -(-(batch + prompt + 64) // 64) * 64)
    if row["backend"] == "sglang" and row["system"] in BLACKWELL:
        return 32768
    return 8192 if row["backend"] == "sglang" else 16384


def _is_inferencemax(row: Mapping[str, str]) -> bool:
    lengths = int(row["isl"]), int(row["osl"])
    return lengths in VARIED and any(name in row["model_path"] for name in INFERENCEMAX)


def _system(row: Mapping[str, str]) -> ServingSoftware:
    """SGLang on Blackwell looks for new requests every 30 steps, every 10 of few requests."""
    found = SYSTEMS[row["backend"]]
    if not _is_inferencemax(row):
        return found
    found = replace(found, front=found.front + CLIENT)
    if row["backend"] != "sglang" or row["system"] not in BLACKWELL:
        return found
    many = int(row["batch_size"] or row["decode_batch_size"]) >= 16
    return replace(found, poll=30 if many else 10)
