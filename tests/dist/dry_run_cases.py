"""The same step on real ranks and in a fake world, as functions that workers call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.ep.dispatch import EvenAllToAllDispatch
from fivefold.core.config import RunConfig
from fivefold.core.environment import Ranks
from fivefold.core.resolve import build as configuration
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.dry_run.measure import Built, measure
from fivefold.engines.train.dry_run.memory import MemoryLog
from fivefold.engines.train.dry_run.run import build, dry_run
from fivefold.engines.train.dry_run.traffic import Traffic
from fivefold.engines.train.process import Process
from fivefold.engines.train.check import check_run
from fivefold.kernels import dispatch
from fivefold.model.decoder import initial_value
from fivefold.model.moe import MixtureOfExperts
from tests.dist.cases import mesh_of

SEQUENCE, MICRO_BATCHES, LAYERS = 32, 4, 4
DENSE = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
# Rows of experts are multiples of 16 bytes, which grouped products ask for.
SPARSE = {
    "model_type": "deepseek_v3", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"dense": DENSE, "sparse": SPARSE}
BALANCE = {"dense": {}, "sparse": {"sequence_aux_loss": 0.001, "bias_update_rate": 0.001}}


def values(model: str, layout: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A configuration of four micro-batches of two sequences each, for each data rank."""
    dp = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    train = {"micro_batch": 2, "global_batch": 2 * MICRO_BATCHES * dp, "loss_chunk": 16}
    return {
        "model": {"config": MODELS[model]},
        "layout": layout,
        "train": {**train, **options.pop("train", {})},
        "data": {"sequence_length": SEQUENCE},
        "moe": BALANCE[model],
        **options,
    }


def real(values: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """What this rank holds and moves in the last of some steps, of gloo and tensors with values."""
    config = configuration(values)
    shape = check_run(config)
    mesh = mesh_of(config.layout)
    world = config.layout.world_size
    rank = dist.get_rank() if dist.is_initialized() else 0
    process = Process(Ranks(rank, world, rank, world, 0), torch.device("cpu"), mesh)

    def built() -> Built:
        found = build(config, shape, process, torch.device("meta"))
        found.model.fill(lambda name, size: initial_value(name, size, shape, 0))
        for module in found.model.module.modules():
            if isinstance(module, MixtureOfExperts):
                module.router.replay = in_turn(module.moe.experts)
        for _ in range(steps - 1):
            found.step(batches(config), 1e-3)
        return found

    with low_precision():
        return measure(built, batches(config), mesh, 1e-3).as_dict()


def fake(
    values: dict[str, Any], ranks: list[int], fault: str | None = None
) -> list[dict[str, Any]]:
    """The same of some ranks, in a process without any."""
    if fault is not None:
        with FAULTS[fault]():
            return fake(values, ranks)
    if dist.is_initialized():  # an offloading run of one rank left its group
        dist.destroy_process_group()
    return [account.as_dict() for account in dry_run(configuration(values), ranks)]


FAULTS: dict[str, Callable[[], Any]] = {
    "freed parameters stay": lambda: patch.object(MemoryLog, "watching_resizes", nullcontext),
    "all rows go to one rank": lambda: patch.object(
        EvenAllToAllDispatch, "_sizes", lambda self, rows, *_: _to_first(self, rows)
    ),
    "sums are not seen": lambda: patch.object(Traffic, "see", _unseen_sums(Traffic.see)),
}


def _to_first(dispatch: EvenAllToAllDispatch, rows: int) -> tuple[list[int], list[int]]:
    here = rows if dist.get_rank(dispatch.group) == 0 else 0
    return [rows] + [0] * (dispatch.ranks - 1), [here] * dispatch.ranks


def _unseen_sums(see: Callable[..., None]) -> Callable[..., None]:
    return lambda self, operator, *rest: (
        None if "allreduce" in str(operator) else see(self, operator, *rest)
    )


def in_turn(experts: int) -> Any:
    """Choices of even load: one expert after the other."""

    def choose(choice: Tensor) -> Tensor:
        return torch.arange(choice.numel()).view(choice.shape) % experts

    return choose


def batches(config: RunConfig) -> list[Batch]:
    train, length = config.train, config.data.sequence_length
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(train.global_batch // (train.micro_batch * config.layout.dp)):
        shape = (train.micro_batch, length)
        tokens, labels = (torch.randint(0, 128, shape, generator=generator) for _ in range(2))
        found.append(Batch(tokens, labels, torch.arange(length).repeat(shape[0], 1), None))
    return found


@contextmanager
def low_precision() -> Iterator[None]:
    """Products in the low formats themselves, as in the fake world, if this CPU has them or not."""
    native = dispatch.NATIVE_ON_CPU
    dispatch.NATIVE_ON_CPU = frozenset({torch.bfloat16, torch.float16})
    try:
        yield
    finally:
        dispatch.NATIVE_ON_CPU = native
