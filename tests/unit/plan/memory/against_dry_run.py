"""A ledger and the engine's own step on fake tensors, of the same configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from fivefold.core.config import RunConfig
from fivefold.core.layout import parse_assignments
from fivefold.core.resolve import build as configuration
from fivefold.engines.train.check import check_run
from fivefold.engines.train.dry_run.account import Memory
from fivefold.engines.train.dry_run.run import dry_run, one_of_each_stage
from fivefold.plan.memory.ledger import Ledger, ledger
from fivefold.plan.shape import ModelShape
from fivefold.plan.software import FIVEFOLD
from fivefold.plan.workload import Strategy, Training

DENSE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SPARSE = {
    "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": DENSE,
    "deep": {**DENSE, "num_hidden_layers": 4},
    "tied": {**DENSE, "tie_word_embeddings": True},
    "sparse": SPARSE,
}


class Pair(NamedTuple):
    """One rank as both have it."""

    planned: Ledger
    executed: Memory
    inputs_seen: bool

    @property
    def states(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parameters, masters, gradients, optimizer."""
        names = ("parameters", "masters", "gradients", "optimizer")
        return (
            tuple(getattr(self.planned, name) for name in names),
            tuple(getattr(self.executed, name) for name in names),
        )

    @property
    def error(self) -> float:
        """Of the peak of everything else. Tokens are made before the dry run looks, if undivided."""
        inputs = 0 if self.inputs_seen else self.planned.activations["inputs"]
        return (self.planned.working - inputs) / self.executed.activations - 1


def pairs(
    model: str | dict[str, Any],
    layout: str = "",
    *,
    dtype: str = "bf16",
    recompute: str = "none",
    sequence: int = 128,
    micro_batch: int = 2,
    count: int = 2,
    chunk: int = 32,
) -> list[Pair]:
    """Of one rank of each pipeline stage."""
    given = parse_assignments(layout)
    dp = given.get("dp_replicate", 1) * given.get("dp_shard", 1)
    config = configuration({
        "model": {"config": MODELS[model] if isinstance(model, str) else model},
        "layout": given,
        "train": {
            "micro_batch": micro_batch, "global_batch": micro_batch * count * dp,
            "loss_chunk": chunk, "recompute": recompute,
        },
        "data": {"sequence_length": sequence},
        "precision": {"dtype": dtype},
    })  # fmt: skip
    planned = plan(config)
    if dist.is_initialized():  # a run of one rank may have left its group
        dist.destroy_process_group()
    executed = dry_run(config, one_of_each_stage(config.layout))
    return [
        Pair(plan, account.memory, config.layout.cp > 1)
        for plan, account in zip(planned, executed, strict=True)
    ]


def plan(config: RunConfig) -> tuple[Ledger, ...]:
    """The ledgers of a training configuration."""
    train = config.train
    return ledger(
        ModelShape("model", check_run(config)),
        Training(config.data.sequence_length, train.global_batch, compute=config.precision.dtype),
        Strategy(config.layout, train.micro_batch, train.recompute),
        replace(FIVEFOLD, chunk=train.loss_chunk),
    )
