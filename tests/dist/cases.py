"""Training runs of a few steps on any layout, as functions that workers call."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fivefold.axes.apply import apply
from fivefold.axes.mesh import Mesh, build_mesh
from fivefold.axes.parallel import ParallelModel
from fivefold.axes.part import Part
from fivefold.core.config import OptimizerSection, PrecisionSection
from fivefold.core.layout import Layout
from fivefold.engines.train.data.batch import Batch
from fivefold.model.objective import Objective
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.engines.train.step import TrainStep
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.precision.loss_scaler import DynamicLossScaler

GLOBAL_BATCH, SEQUENCE, VOCABULARY = 8, 24, 131
LR, CLIP = 3e-3, 0.5
# The vocabulary is a prime and the bucket small: parameters divide unevenly, and into many buckets.
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.08,
}  # fmt: skip
BUCKET_BYTES = 16384
UNTIED = {**CONFIG, "tie_word_embeddings": False, "attention_bias": True}
# Every parameter divides by 4: what a rank holds is then exactly what the formulae say.
EVEN = {**CONFIG, "vocab_size": 128, "intermediate_size": 64}


def global_batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each sequence; every sequence has another number of targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for index in range(GLOBAL_BATCH):
        tokens = torch.randint(0, 128, (SEQUENCE + 1,), generator=generator)
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


@cache  # a mesh makes process groups, and the workers live long
def mesh_of(layout: Layout) -> Mesh | None:
    return build_mesh(layout, "cpu") if layout.world_size > 1 else None


class Run:
    """One training run of this rank: two micro-batches a step, whatever the layout."""

    def __init__(
        self,
        layout: str,
        config: dict[str, Any] | ModelConfig = CONFIG,
        precision: str = "fp32",
        reduce: str = "fp32",
        **options: Any,
    ) -> None:
        chosen = Layout.parse(layout)
        shape = config if isinstance(config, ModelConfig) else parse_config(config)
        decoder = Decoder(shape)
        decoder.initialize(0)
        mesh = mesh_of(chosen)
        self.rank, self.ranks = (
            mesh.place(("dp_replicate", "dp_shard")) if mesh is not None else (0, 1)
        )
        self.axis: ParallelModel = apply(
            Objective(decoder, chunk=16),
            layout=chosen,
            mesh=mesh,
            precision=PrecisionSection(dtype=precision, reduce=reduce),
            **{"bucket_bytes": BUCKET_BYTES, **options},
        )
        self.optimizer = MasterOptimizer(
            self.axis.masters(), self.axis.gradients, OptimizerSection(lr=LR)
        )
        scaler = DynamicLossScaler(1024.0) if precision == "fp16" else None
        self.step = TrainStep(self.axis, self.optimizer, scaler, CLIP, torch.device("cpu"))

    def steps(self, start: int, stop: int, micro_batch: int | None = None) -> list[Any]:
        """(loss, gradient norm) of each step."""
        micro_batch = micro_batch or GLOBAL_BATCH // self.ranks // 2
        rows = []
        for index in range(start, stop):
            result = self.step(batches(index, self.rank, self.ranks, micro_batch), LR)
            rows.append((result.loss, result.grad_norm))
        return rows

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments, whole, the same on each rank."""
        held = self.axis.masters() | self.axis.buffers()
        masters = {f"model/{name}": value for name, value in held.items()}
        return whole(masters | self.optimizer.state_tensors())


def whole(parts: dict[str, Part]) -> dict[str, torch.Tensor]:
    """Whole tensors on every rank, from what each rank holds. Collective where ranks run."""
    here = {n: (p.slice, p.values.clone()) for n, p in parts.items()}
    everywhere: list[Any] = [here]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
    full: dict[str, torch.Tensor] = {}
    for rank_parts in everywhere:
        for name, (place, values) in rank_parts.items():
            if name not in full:
                full[name] = torch.full(place.whole, torch.nan, dtype=values.dtype)
            place.cut(full[name]).copy_(values)
    return full


def train(
    layout: str,
    config: dict[str, Any] = CONFIG,
    steps: int = 20,
    precision: str = "fp32",
    micro_batch: int | None = None,
    fault: AbstractContextManager[Any] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Losses and norms of every step, and the final masters and moments."""
    run = Run(layout, config, precision, **(options or {}))
    with fault or nullcontext():
        rows = run.steps(0, steps, micro_batch)
    return {"rows": rows, "state": run.state()}


def resumed(layout: str, precision: str = "fp32") -> dict[str, Any]:
    """Four steps at once, and as two, everything built anew from the saved state, and two."""
    straight = Run(layout, precision=precision)
    rows = straight.steps(0, 4)
    first = Run(layout, precision=precision)
    first.steps(0, 2)
    second = Run(layout, precision=precision)
    for kind in ("masters", "moments"):
        ours, theirs = (
            run.axis.masters() if kind == "masters" else run.optimizer.state_tensors()
            for run in (second, first)
        )
        for name, value in ours.items():
            value.values.copy_(theirs[name].values)
    second.optimizer.load_scalars(first.optimizer.scalars())
    second.axis.publish()
    return {
        "rows": (rows[2:], second.steps(2, 4)),
        "state": (straight.state(), second.state()),
    }


def held_bytes(layout: str, precision: str = "fp32") -> dict[str, int]:
    """Bytes of the storages that live between backward and update, found by walking the process.

    "gradients" is everything that is not a parameter, master or moment: buckets and whatever else
    was left lying about count against it.
    """
    before = _storages()  # kept alive, so that no new storage takes an old one's address
    run = Run(layout, EVEN, precision)
    run.steps(0, 1)
    _backward(run)
    parameters = _keys(run.axis.module.parameters())
    masters = _keys(run.axis.masters().values())
    moments = _keys(run.optimizer.state_tensors().values())
    held = {"parameters": 0, "masters": 0, "moments": 0, "gradients": 0}
    for key, tensor in _storages().items():
        size = tensor.untyped_storage().nbytes()
        if key in before or not tensor.is_floating_point() or size <= 8:
            continue  # scalars (step counts, norms, losses) are no part of the table
        if key in parameters:
            held["parameters"] += size
        elif key in masters:
            held["masters"] += size
        elif key in moments:
            held["moments"] += size
        else:
            held["gradients"] += size
    return held


def _backward(run: Run) -> None:
    """A step up to `reduce`."""
    for last in (False, True):
        batch = batches(1, run.rank, run.ranks, 1)[int(last)]
        run.axis.axis.begin(last)
        run.axis.module(batch.tokens, batch.labels, batch.positions, None).backward()
    run.axis.reduce()


def _storages() -> dict[int, torch.Tensor]:
    """A tensor of each storage that Python holds a plain tensor of."""
    gc.collect()
    return {
        thing.untyped_storage()._cdata: thing
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter)
    }


def _keys(tensors: Any) -> set[int]:
    plain = (t.values if isinstance(t, Part) else t for t in tensors)
    return {(t.to_local() if isinstance(t, DTensor) else t).untyped_storage()._cdata for t in plain}


def setup(layout: str, config: dict[str, Any], precision: str) -> Any:
    """Axis, optimizer and step."""
    run = Run(layout, config, precision)
    return run.axis, run.optimizer, run.step
