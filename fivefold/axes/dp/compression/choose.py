"""Which compressor the configuration asks for, and where it cannot work."""

from __future__ import annotations

from functools import partial

import torch

from fivefold.axes.dp.compression.half import Half
from fivefold.axes.dp.compression.power_sgd import PowerSGD
from fivefold.axes.dp.compression.protocol import MakeCompressor
from fivefold.axes.dp.compression.top_k import TopK
from fivefold.axes.dp.compression.warmup import Warmup
from fivefold.axes.dp.compression.wire import Wire
from fivefold.core.config import CommunicationSection
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout


def choose(section: CommunicationSection, wire_dtype: torch.dtype) -> MakeCompressor:
    """What makes the compressor of a bucket. `wire_dtype`: of gradients that travel whole."""
    plain = partial(Wire, dtype=wire_dtype)
    then: MakeCompressor
    match section.compression:
        case "none":
            return plain
        case "bf16":
            return partial(Wire, dtype=torch.bfloat16)
        case "fp16":
            return Half
        case "powersgd":
            then = partial(PowerSGD, rank=section.rank)
        case "topk":
            then = partial(TopK, ratio=section.ratio)
    if section.warmup_steps == 0:
        return then
    return partial(Warmup, steps=section.warmup_steps, first=plain, then=then)


def check_compression(section: CommunicationSection, layout: Layout) -> None:
    """Raise LayoutError where gradients are never whole on a rank, which compressors need.

    bf16 goes with every layout: it is a format, and needs no more than that.
    """
    if section.compression in ("none", "bf16"):
        return
    divided = layout.shards > 1 and layout.zero > 1
    if divided or layout.offload == "parameters":
        what = f"zero={layout.zero}" if divided else "offload=parameters"
        raise LayoutError(
            f"communication.compression={section.compression} needs a rank's whole gradient, "
            f"which {what} divides while backward runs",
            "use zero=1 (or dp_replicate), or communication.compression=bf16",
        )
