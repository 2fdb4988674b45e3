"""Training runs of a few steps on any layout, as functions that workers call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fivefold.axes.apply import apply
from fivefold.axes.mesh import build_mesh
from fivefold.core.config import OptimizerSection, PrecisionSection
from fivefold.core.layout import Layout
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.objective import Objective
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.engines.train.step import TrainStep
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.precision.loss_scaler import DynamicLossScaler

GLOBAL_BATCH, SEQUENCE = 8, 24
CONFIG = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.08,
}  # fmt: skip
UNTIED = {**CONFIG, "tie_word_embeddings": False, "attention_bias": True}


def global_batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each sequence; every sequence has another number of targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for index in range(GLOBAL_BATCH):
        tokens = torch.randint(0, 131, (SEQUENCE + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: (index * 5 + step) % SEQUENCE] = -100
        rows.append((tokens[:-1], labels))
    return rows


def batches(step: int, rank: int, ranks: int, micro_batch: int) -> list[Batch]:
    each = GLOBAL_BATCH // ranks
    rows = global_batch(step)[rank * each : (rank + 1) * each]
    found = []
    for start in range(0, each, micro_batch):
        part = rows[start : start + micro_batch]
        tokens = torch.stack([t for t, _ in part])
        labels = torch.stack([label for _, label in part])
        positions = torch.arange(SEQUENCE).expand_as(tokens).contiguous()
        found.append(Batch(tokens, labels, positions, None))
    return found


def setup(
    layout: str, config: dict[str, Any], precision: str, **options: Any
) -> tuple[Any, MasterOptimizer, TrainStep]:
    chosen = Layout.parse(layout)
    mesh = build_mesh(chosen, "cpu") if chosen.world_size > 1 else None
    decoder = Decoder(parse_config(config))
    decoder.initialize(0)
    axis = apply(
        Objective(decoder, chunk=16), layout=chosen, mesh=mesh,
        precision=PrecisionSection(dtype=precision), **{"bucket_bytes": 8192, **options},
    )  # fmt: skip
    optimizer = MasterOptimizer(axis.masters(), axis.gradients, OptimizerSection(lr=3e-3))
    scaler = DynamicLossScaler(1024.0) if precision == "fp16" else None
    return axis, optimizer, TrainStep(axis, optimizer, scaler, 0.5, torch.device("cpu"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def train(
    layout: str,
    config: dict[str, Any] = CONFIG,
    steps: int = 20,
    precision: str = "fp32",
    micro_batch: int = 1,
    fault: AbstractContextManager[Any] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Losses and norms of every step, final masters, and bytes held by this rank."""
    axis, optimizer, step = setup(layout, config, precision, **(options or {}))
    ranks = Layout.parse(layout).dp
    rank = dist.get_rank() if ranks > 1 else 0
    rows = []
    with fault or nullcontext():
        for index in range(steps):
            result = step(batches(index, rank, ranks, micro_batch), 3e-3)
            rows.append((result.loss, result.grad_norm))
    return {
        "rows": rows,
        "masters": {name: whole(value) for name, value in axis.masters().items()},
        "moments": {name: whole(value) for name, value in optimizer.state_tensors().items()},
    }
