"""Training systems whose results are published, as conventions that every prediction for them shares.

`FIVEFOLD` is this package. A cluster says what its machines can do; these say how it is used.
"""

from __future__ import annotations

from fivefold.core.errors import PlanError, nearest
from fivefold.plan.workload import Software

FIVEFOLD = Software(
    "fivefold",
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
    dispatch=8e-6,
    update=60.0,
    blocking_sends=True,
    even_stages=True,
    source="Narayanan et al. 2021 (2104.04473): fp16, gradients all-reduced after the last backward, "
    "sends that block, scattered over tensor ranks (section 4.1), fused softmax (4.2)",
)
MEGATRON_2022 = Software(
    "megatron-2022",
    gradient_bytes=2,
    fused_attention=False,
    fused_loss=False,
    overlap=0.0,
    overlap_tensor=0.5,
    dropout=True,
    keeps_gathered=False,
    selective="attention",
    flat_shards=True,
    dispatch=8e-6,
    update=60.0,
    blocking_sends=True,
    even_stages=True,
    source="Korthikanti et al. 2022 (2205.05198): as 2021, with backward's traffic of tensor ranks "
    "beside the weights' gradients",
)
MEGATRON_DEEPSPEED = Software(
    "megatron-deepspeed",
    gradient_bytes=2,
    fused_attention=False,
    fused_loss=False,
    overlap=0.0,
    dropout=True,
    selective="attention",
    flat_shards=True,
    dispatch=8e-6,
    update=60.0,
    blocking_sends=True,
    scatter_sends=False,
    even_stages=True,
    source="github.com/microsoft/Megatron-DeepSpeed, as in vTrain (2312.12391): fp16, PipelineEngine",
)
SYSTEMS = {each.name: each for each in (FIVEFOLD, MEGATRON_2021, MEGATRON_2022, MEGATRON_DEEPSPEED)}


def software(name: str) -> Software:
    """A system by its name. Raises PlanError that lists the close ones."""
    if name not in SYSTEMS:
        raise PlanError(f"unknown training system {name!r}", nearest(name, SYSTEMS))
    return SYSTEMS[name]
