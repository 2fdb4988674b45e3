"""What a serving system does the same for every model: its order of work and what that costs.

The figures are of the systems' own defaults and of profiles that their makers published; they are
shared by every prediction. `FIVEFOLD` is this package's engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.errors import PlanError, nearest

Order = Literal["mixed", "prompts-first"]


@dataclass(frozen=True)
class ServingSoftware:
    """One system.

    order: `mixed` puts tokens of answers and chunks of prompts into one step (Sarathi-Serve);
        `prompts-first` reads all prompts that wait before any answer goes on.
    host: seconds a step that the device waits for the host (scheduling, sampling, bookkeeping).
    kernels: how many kernels a layer takes, beside those that `launches` counts: 1.0 is a system
        that fuses what can be fused.
    front: seconds between a client and the scheduler for each request (HTTP, tokenizer, queues)
        and back for its first token.
    poll: steps between two looks at the line of new requests.
    reserve: share of a device's memory for graphs, workspaces and what is fragmented.
    first_from: with prefill and decode apart, which of them sends the first token.
    """

    name: str
    order: Order = "mixed"
    host: float = 0.0
    kernels: float = 1.0
    front: float = 0.0
    poll: int = 1
    reserve: float = 0.05
    token_budget: int = 8192
    first_from: Literal["prefill", "decode"] = "prefill"
    source: str = ""


FIVEFOLD = ServingSoftware(
    "fivefold",
    host=0.4e-3,
    front=4e-3,
    token_budget=512,
    source="this package's engine; host and front measured on two cores of Zen 3",
)
VLLM = ServingSoftware(
    "vllm",
    host=1.0e-3,
    kernels=1.25,
    front=0.01,
    source="vLLM v1: chunked prefill in one batch with decode, 8192 tokens a step on the server",
)
SGLANG = ServingSoftware(
    "sglang",
    order="prompts-first",
    host=0.5e-3,
    kernels=1.25,
    front=0.01,
    first_from="decode",
    source="SGLang: a prefill batch before decode, chunks of 8192, scheduling overlapped",
)
TENSORRT_LLM = ServingSoftware(
    "trtllm",
    host=0.3e-3,
    kernels=0.85,
    front=0.01,
    source="TensorRT-LLM PyTorch backend: in-flight batching, overlap scheduler, fused kernels",
)
SYSTEMS = {each.name: each for each in (FIVEFOLD, VLLM, SGLANG, TENSORRT_LLM)}


def software(name: str) -> ServingSoftware:
    """A system by its name. Raises PlanError that lists the close ones."""
    if name not in SYSTEMS:
        raise PlanError(f"unknown serving system {name!r}", nearest(name, SYSTEMS))
    return SYSTEMS[name]
