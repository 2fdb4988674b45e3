"""From a configuration to the account of one rank, or of one rank of each pipeline stage."""

from __future__ import annotations

# B batch, S sequence
from collections.abc import Sequence

import torch

from fivefold.axes.apply import apply
from fivefold.axes.ep.dispatch import AllToAllDispatch, EvenAllToAllDispatch
from fivefold.core.config import RunConfig
from fivefold.core.errors import ConfigError
from fivefold.core.layout import Layout
from fivefold.engines.train.check import check_run
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.dry_run.account import Account
from fivefold.engines.train.dry_run.fake_world import fake_world
from fivefold.engines.train.dry_run.measure import Built, measure
from fivefold.engines.train.optimizer import MasterOptimizer
from fivefold.engines.train.process import Process
from fivefold.engines.train.step import TrainStep
from fivefold.kernels.dispatch import deterministic
from fivefold.kernels.grouped_linear import ALIGNMENT
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.moe import MixtureOfExperts
from fivefold.model.objective import Objective
from fivefold.precision.formats import DTYPES
from fivefold.precision.loss_scaler import DynamicLossScaler


def dry_run(config: RunConfig, ranks: Sequence[int]) -> list[Account]:
    """One step of each of `ranks`, one after the other.

    Raises what training would raise for the model, layout and batch, and ConfigError for a rank
    that the layout does not have and for experts whose work depends on values.
    """
    model_config = check_run(config)
    world = config.layout.world_size
    for rank in ranks:
        if not 0 <= rank < world:
            raise ConfigError(
                f"there is no rank {rank} among the {world} of the layout",
                f"choose one from 0 to {world - 1}",
            )
    if model_config.moe is not None:
        _check_experts(config, model_config)
    return [_account(config, model_config, rank) for rank in ranks]


def one_of_each_stage(layout: Layout) -> list[int]:
    """Rank numbers that differ in the pipeline axis alone, from rank 0 on."""
    inside = layout.order[layout.order.index("pp") + 1 :]
    step = 1
    for axis in inside:
        step *= getattr(layout, axis)
    return [stage * step for stage in range(layout.pp)]


def _account(config: RunConfig, model_config: ModelConfig, rank: int) -> Account:
    with (
        fake_world(config.layout, rank) as process,
        deterministic(config.train.kernels == "deterministic"),
    ):
        return measure(
            # Not from the meta device: `to_empty` cannot swap fake parameters.
            lambda: _evenly_loaded(build(config, model_config, process, process.device)),
            _batches(config),
            process.mesh,
            config.optimizer.lr,
        )


def build(
    config: RunConfig, model_config: ModelConfig, process: Process, device: torch.device
) -> Built:
    """As `engines.train.run.build_trainer` and the trainer do, from a decoder on `device`.

    Less compilation, which changes no number but those of temporaries.
    """
    objective = Objective(
        Decoder(model_config, device=device),
        z_loss=config.train.z_loss,
        chunk=config.train.loss_chunk,
    )
    model = apply(
        objective,
        layout=config.layout,
        mesh=process.mesh,
        precision=config.precision,
        recompute=config.train.recompute,
        recompute_every=config.train.recompute_every,
        sequence_length=config.data.sequence_length,
        moe=config.moe,
        communication=config.communication,
        device=process.device,
    )
    optimizer = MasterOptimizer(model.masters(), model.gradients, config.optimizer)
    fp16 = config.precision.dtype == "fp16"
    scaler = DynamicLossScaler(config.precision.loss_scale) if fp16 else None
    step = TrainStep(model, optimizer, scaler, config.train.clip_norm, process.device)
    return Built(model, optimizer, step)


def _batches(config: RunConfig) -> list[Batch]:
    """The step's micro-batches of a data rank: one document a row."""
    train, length = config.train, config.data.sequence_length
    shape = (train.micro_batch, length)
    count = train.global_batch // (train.micro_batch * config.layout.dp)
    found = []
    for _ in range(count):
        tokens, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        found.append(Batch(tokens, labels, positions, None))
    return found


def _evenly_loaded(built: Built) -> Built:
    """How many rows go to which rank is the one thing that depends on values: assume even load."""
    for module in built.model.module.modules():
        if isinstance(module, MixtureOfExperts) and isinstance(module.dispatcher, AllToAllDispatch):
            module.dispatcher = EvenAllToAllDispatch(
                module.dispatcher.group, module.dispatcher.experts
            )
    return built


def _check_experts(config: RunConfig, model_config: ModelConfig) -> None:
    """Grouped products read counts on the device; a loop over experts would need their values."""
    moe, dtype = model_config.moe, DTYPES[config.precision.dtype]
    assert moe is not None
    sizes = (model_config.hidden_size, moe.expert_size)
    if dtype == torch.float64 or any(size * dtype.itemsize % ALIGNMENT for size in sizes):
        raise ConfigError(
            f"a dry run of experts of {sizes[0]} x {sizes[1]} in {config.precision.dtype} would "
            "need to know how many tokens each is given",
            f"use precision.dtype=bf16 or fp32 and rows of a multiple of {ALIGNMENT} bytes",
        )
    if config.moe.capacity_factor is not None and config.layout.ep == 1:
        raise ConfigError(
            "a dry run with moe.capacity_factor would need to know which tokens are dropped",
            "set moe.capacity_factor to null: under even load nothing is dropped",
        )
