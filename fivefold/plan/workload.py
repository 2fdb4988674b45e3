"""What is to be done: a training run, or requests to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.layout import Layout

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Training:
    """`global_batch` sequences of `sequence` tokens a step; `tokens` in all, if it ends."""

    sequence: int
    global_batch: int
    tokens: float | None = None
    compute: str = "bf16"  # format of products: bf16, fp16, fp32, fp8, mxfp8
    optimizer: Literal["adamw", "sgd"] = "adamw"


@dataclass(frozen=True)
class Software:
    """What a training system does the same in every layout.

    gradient_bytes: of one element of the gradients that are kept and reduced.
    parameter_bytes: of one element that forward computes with, beside masters if below 4.
    fused_attention: scores are never whole in memory (Dao et al. 2022).
    fused_loss: logits exist for a chunk of tokens at a time.
    overlap: share of the gradients' (and ZeRO-3's) traffic that can run beside computation.
    overlap_tensor: the same for the tensor axis.
    overlap_parameters: share of the gathering of updated parameters (ZeRO 1 and 2) that runs beside the
        next forward.
    dropout: masks are kept beside what they drop (GPT-2 and GPT-3; no model of ours).
    keeps_gathered: what tensor ranks gather along the sequence for a product is kept for backward;
        else it is gathered again (Korthikanti et al. 2022).
    selective: what recompute=selective keeps or drops: `products` keeps results of matrix products
        and drops the rest; `attention` drops scores alone, and keeps the rest.
    flat_shards: ZeRO divides a flat vector evenly (Megatron, DeepSpeed), and ZeRO-3 keeps parameters
        of `parameter_bytes` beside masters; else rows of each parameter, and masters alone.
    remakes: backward makes normalised and gated operands of products again (unless blocks do).
    chunk: tokens whose logits exist at a time, with fused_loss.
    bucket: bytes of fp32 gradients that are sent at a time.
    accumulate: bytes of memory that adding a micro-batch's gradient to the sum reads and writes for one
        parameter; 0: the product that makes the gradient adds it.
    dispatch: seconds the host takes to start one operator.
    update: bytes of memory that a step of the optimizer reads and writes for one parameter.
    blocking_sends: a rank computes nothing while it sends to or receives from another stage.
    scatter_sends: each tensor rank sends its share of whole hidden states, and they are gathered on
        the other side (Narayanan et al. 2021); with sequence parallelism they are in shares anyway.
    even_stages: every stage has the same number of layers; else they are split by cost.
    overlap_experts: share of the all-to-all of experts that can run beside computation.
    dispatch_once: a token goes once to each domain that has experts for it, and from there to them
        (DeepEP); else once for each expert.
    dispatch_bytes: of one element of what is sent to experts; 0: as the run computes.
    imbalance: tokens of the busiest expert rank over the mean.
    """

    name: str
    gradient_bytes: int = 4
    parameter_bytes: int = 2
    fused_attention: bool = True
    fused_loss: bool = True
    overlap: float = 1.0
    overlap_tensor: float = 0.0
    overlap_parameters: float = 0.0
    source: str = ""
    dropout: bool = False
    keeps_gathered: bool = True
    selective: Literal["products", "attention"] = "products"
    flat_shards: bool = False
    remakes: bool = False
    chunk: int = 256
    bucket: int = 25 << 20
    accumulate: float = 10.0
    dispatch: float = 6e-6
    update: float = 50.0
    blocking_sends: bool = False
    scatter_sends: bool = True
    even_stages: bool = False
    overlap_experts: float = 0.0
    dispatch_once: bool = False
    dispatch_bytes: int = 0
    imbalance: float = 1.1


@dataclass(frozen=True)
class Strategy:
    """What a search chooses. `micro_batch`: sequences of one forward pass of one data rank."""

    layout: Layout
    micro_batch: int
    recompute: Recompute = "none"

    def microbatches(self, training: Training) -> int:
        """Forward passes of one data rank in a step."""
        return training.global_batch // (self.micro_batch * self.layout.dp)
