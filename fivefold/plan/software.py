"""Training systems whose results are published, as conventions that every prediction for them shares.

`FIVEFOLD` is this package. A cluster says what its machines can do; these say how it is used.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.errors import PlanError
from fivefold.plan.workload import Software

FIVEFOLD = Software(
    "fivefold",
    remakes=True,
    source="this package: fused attention, loss in chunks, gradients summed in fp32 beside backward",
)
MEGATRON_2021 = Software(
    "megatron-2021",
    gradient_bytes=2,
    fused_attention=False,
    fused_loss=False,
    overlap=0.0,
    dropout=True,
    selective="attention",
    flat_shards=True,
    accumulate=6.0,
    dispatch=30e-6,
    update=60.0,
    blocking_sends=True,
    even_stages=True,
    source="Narayanan et al. 2021 (2104.04473): fp16, gradients all-reduced after the last backward, "
    "sends that block, scattered over tensor ranks (section 4.1), fused softmax (4.2)",
)
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="megatron-2022",
    gradient_bytes=4,
    overlap_tensor=0.3,
    keeps_gathered=False,
    accumulate=0.0,
    source="Korthikanti et al. 2022 (2205.05198): as 2021, with some of backward's traffic of tensor "
    "ranks beside the weights' gradients (what table 4's times of a layer leave room for)",
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="megatron-deepspeed",
    dispatch=46e-6,
    update=34.0,
    source="github.com/microsoft/Megatron-DeepSpeed as vTrain (2312.12391) ran it: fp16, 1F1B. dispatch and "
    "update: its layers on one node take 3 ms however small, and 32 bytes a parameter",
)
MEGATRON_CORE = Software(
    "megatron-core",
    fused_loss=False,
    accumulate=0.0,
    overlap=1.0,
    overlap_tensor=0.7,
    overlap_parameters=1.0,
    keeps_gathered=False,
    selective="attention",
    flat_shards=True,
    even_stages=True,
    source="github.com/NVIDIA/Megatron-LM of 2024: FlashAttention, distributed optimizer, gradients and "
    "parameters beside computation, tensor ranks' traffic beside products",
)
LLAMA_2024 = replace(
    FIVEFOLD,
    name="llama-2024",
    remakes=False,
    source="Llama 3 (2407.21783), section 3.3.2: FSDP that keeps parameters after forward, gradients in fp32, "
    "interleaved 1F1B, context ranks that gather keys and values",
)
DEEPSEEK_V3 = replace(
    FIVEFOLD,
    name="deepseek-v3",
    remakes=False,
    overlap_experts=1.0,
    dispatch_once=True,
    dispatch_bytes=1,
    source="DeepSeek-V3 (2412.19437), section 3: DualPipe with all-to-all beside computation, tokens once to "
    "each of at most four nodes, in FP8; gradients in fp32",
)
SYSTEMS = {
    each.name: each
    for each in (
        FIVEFOLD,
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_DEEPSPEED,
        MEGATRON_CORE,
        LLAMA_2024,
        DEEPSEEK_V3,
    )
}


def software(name: str) -> Software:
    """A system by its name. Raises PlanError that lists the close ones."""
    if name not in SYSTEMS:
        raise PlanError(f"unknown training system {name!r}", f"known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
