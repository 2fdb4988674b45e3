"""Flags of SGLang's server (python/sglang/srt/server_args.py, 0.5 and later)."""

from __future__ import annotations

from typing import Literal

from fivefold.plan.export.flags import Flags, Writer
from fivefold.plan.serving.strategy import ServingStrategy

Role = Literal["both", "prefill", "decode"]
MADE = {"fp8": "fp8"}


def sglang(
    model: str, strategy: ServingStrategy, *, context: int | None = None, role: Role = "both"
) -> Flags:
    """One engine of `strategy`; `context`: the longest prompt and answer together."""
    out = Writer()
    layout = strategy.layout
    out.add("tp-size", layout.tp * layout.dp_shard)
    if layout.dp_shard > 1:
        # Its attention's data ranks are a part of its tensor ranks.
        out.add("dp-size", layout.dp_shard)
        out.add("enable-dp-attention")
    if layout.pp > 1:
        out.add("pp-size", layout.pp)
    if layout.ep > 1:
        out.add("ep-size", layout.ep)
    _formats(out, strategy)
    if context is not None:
        out.add("context-length", context)
    out.add("max-running-requests", strategy.max_sequences * layout.dp_shard)
    out.add("chunked-prefill-size", strategy.budget)
    out.add("mem-fraction-static", round(strategy.memory_share, 3))
    out.add("page-size", strategy.block_size)
    if strategy.speculation is not None:
        out.add("speculative-algorithm", "EAGLE")
        out.add("speculative-num-steps", strategy.speculation.drafted)
        out.add("speculative-eagle-topk", 1)
        out.add("speculative-num-draft-tokens", strategy.speculation.drafted + 1)
        out.note("name your own draft model: the plan knows its acceptance only")
    if role != "both":
        out.add("disaggregation-mode", role)
    if layout.dp_replicate > 1:
        out.note(f"start {layout.dp_replicate} of these behind a router")
    return out.done("SGLang", f"python -m sglang.launch_server --model-path {model}")


def _formats(out: Writer, strategy: ServingStrategy) -> None:
    form = strategy.weights
    out.weights(form, MADE)
    if strategy.kv == "fp8":
        out.add("kv-cache-dtype", "fp8_e4m3")
    elif strategy.kv not in ("bf16", "fp16", form):
        out.note(f"it does not keep keys and values in {strategy.kv}")
