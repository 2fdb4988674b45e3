"""Three steps of a small model on any layout, with every gradient, as a function for workers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from fivefold.core.config import MoESection
from fivefold.core.layout import Layout
from fivefold.engines.train.data.batch import Batch
from fivefold.model.config import ModelConfig
from fivefold.model.families import parse_config
from tests.dist.cases import GLOBAL_BATCH, LR, SEQUENCE, Run, global_batch, whole
from tests.parity.lattice.faults import FAULTS

DENSE = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.08,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "initializer_range": 0.08,
}  # fmt: skip
QWEN_MOE = {
    **DENSE, "model_type": "qwen3_moe", "attention_bias": False, "moe_intermediate_size": 12,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": {
        **DENSE, "model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": False,
    },
    "moe": QWEN_MOE,
    "mla": DEEPSEEK,
}  # fmt: skip
MOE = {
    "moe": MoESection(aux_loss=0.02, router_z_loss=0.01),
    "mla": MoESection(sequence_aux_loss=0.05, bias_update_rate=0.01),
}


def model_config(name: str, layout: str = "") -> ModelConfig:
    """Eight layers for pipelines of more than four stages, else four."""
    chosen = Layout.parse(layout)
    stages = chosen.pp * (2 if chosen.schedule in TWO_EACH else 1)
    config = parse_config({**MODELS[name], "num_hidden_layers": 8 if stages > 4 else 4})
    if name == "moe":  # with an expert that all tokens share
        assert config.moe is not None
        config = replace(config, moe=replace(config.moe, shared_size=20))
    return config


STEPS = 3
TWO_EACH = ("interleaved", "zbv", "dualpipe-v")  # stages a rank
PACKED = ("dense", "mla")  # the others have one document a row


def batches(step: int, rank: int, ranks: int, packed: bool) -> list[Batch]:
    """Micro-batches of one sequence, each with another number of targets.

    packed: two documents and padding in a row, borders elsewhere in each.
    """
    each = GLOBAL_BATCH // ranks
    found = []
    for index, (tokens, labels) in enumerate(global_batch(step)):
        positions, documents = torch.arange(SEQUENCE), None
        if packed:
            first, end = 3 + (index * 7 + step) % 15, SEQUENCE - index % 4
            documents = (positions >= first).long()
            documents[end:] = -1
            labels = labels.clone()
            labels[[first - 1, *range(end - 1, SEQUENCE)]] = -100
            positions = torch.where(positions >= first, positions - first, positions)
            documents = documents.unsqueeze(0)
        found.append(
            Batch(tokens.unsqueeze(0), labels.unsqueeze(0), positions.unsqueeze(0), documents)
        )
    return found[rank * each : (rank + 1) * each]


def train(
    layout: str,
    model: str,
    dtype: str = "fp64",
    fault: str | None = None,
    options: dict[str, Any] | None = None,
    shape_of: str = "",
    steps: int = STEPS,
) -> dict[str, Any]:
    """(loss, norm) of each step, each step's gradients, the final masters and moments.

    shape_of: the layout that the model's depth is chosen for, if not this one.
    """
    planted = FAULTS[fault].plant() if fault else nullcontext()
    with planted:
        return _train(layout, model, dtype, options or {}, shape_of, steps)


def _train(
    layout: str, model: str, dtype: str, options: dict[str, Any], shape_of: str, steps: int
) -> dict[str, Any]:
    moe = MOE.get(model, MoESection())
    run = Run(layout, model_config(model, shape_of or layout), dtype, moe=moe, **options)
    gradients: list[dict[str, torch.Tensor]] = []
    reduce = run.axis.reduce

    def recorded() -> None:
        reduce()
        masters = run.axis.masters()
        gradients.append(whole({n: masters[n].like(g) for n, g in run.axis.gradients().items()}))

    run.axis.reduce = recorded  # type: ignore[method-assign]
    rows = []
    for step in range(steps):
        result = run.step(batches(step, run.rank, run.ranks, model in PACKED), LR)
        rows.append((result.loss, result.grad_norm))
    return {"rows": rows, "gradients": gradients, "state": run.state()}


def errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """The largest relative errors of losses and norms, of a gradient, and of masters and moments."""
    rows = [
        abs(a - b) / abs(b)
        for ours, theirs in zip(found["rows"], wanted["rows"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    pairs = zip(found["gradients"], wanted["gradients"], strict=True)
    return {
        "rows": max(rows, default=0.0),
        "gradients": max((_largest(ours, theirs) for ours, theirs in pairs), default=0.0),
        "state": _largest(found["state"], wanted["state"]),
    }


def _largest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    largest = 0.0
    for name, value in wanted.items():
        error = float((found[name] - value).norm() / value.norm().clamp(min=1e-30))
        largest = error if not error <= largest else largest  # a NaN stays
    return largest
