"""Flags of vLLM's server (vllm/engine/arg_utils.py, 0.10 and later)."""

from __future__ import annotations

import json
from typing import Literal

from fivefold.plan.export.flags import Flags, Writer
from fivefold.plan.serving.strategy import ServingStrategy

Role = Literal["both", "prefill", "decode"]
# Formats that vLLM makes of 16-bit weights when it loads them.
MADE = {"fp8": "fp8"}
BLOCKS = (8, 16, 32, 64, 128)


def vllm(
    model: str, strategy: ServingStrategy, *, context: int | None = None, role: Role = "both"
) -> Flags:
    """One engine of `strategy`; `context`: the longest prompt and answer together."""
    out = Writer()
    layout = strategy.layout
    out.add("tensor-parallel-size", layout.tp)
    if layout.pp > 1:
        out.add("pipeline-parallel-size", layout.pp)
    if layout.dp_shard > 1:
        out.add("data-parallel-size", layout.dp_shard)
    if layout.ep > 1:
        out.add("enable-expert-parallel")
        if layout.ep != layout.tp * layout.dp_shard:
            out.note(
                f"its experts lie on all {layout.tp * layout.dp_shard} ranks, not on {layout.ep}"
            )
    _formats(out, strategy)
    if context is not None:
        out.add("max-model-len", context)
    out.add("max-num-seqs", strategy.max_sequences)
    out.add("max-num-batched-tokens", strategy.budget)
    if strategy.block_size in BLOCKS:
        out.add("block-size", strategy.block_size)
    out.add("gpu-memory-utilization", round(strategy.memory_share, 3))
    _speculation(out, strategy)
    if role != "both":
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        out.add("kv-transfer-config", json.dumps(transfer))
        out.note(f"this is an engine of {role}; a proxy that knows both kinds stands before them")
    if layout.dp_replicate > 1:
        out.note(f"start {layout.dp_replicate} of these behind a router")
    return out.done("vLLM", f"vllm serve {model}")


def _formats(out: Writer, strategy: ServingStrategy) -> None:
    form = strategy.weights
    out.weights(form, MADE)
    if strategy.experts is not None and strategy.experts != form:
        out.note(f"experts in {strategy.experts} need a model that is stored so")
    if strategy.kv == "fp8":
        out.add("kv-cache-dtype", "fp8")
    elif strategy.kv not in ("bf16", "fp16", form):
        out.note(f"it does not keep keys and values in {strategy.kv}")


def _speculation(out: Writer, strategy: ServingStrategy) -> None:
    if strategy.speculation is not None:
        drafted = {"method": "ngram", "num_speculative_tokens": strategy.speculation.drafted}
        out.add("speculative-config", json.dumps(drafted))
        out.note("name your own draft in --speculative-config: the plan knows its acceptance only")
