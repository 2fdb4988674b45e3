"""Three steps of a small model on any layout, with every gradient, as a function for workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fivefold.core.config import MoESection
from fivefold.model.config import ModelConfig
from fivefold.model.families import parse_config
from tests.dist.cases import Run, whole

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


def model_config(name: str) -> ModelConfig:
    config = parse_config(MODELS[name])
    if name == "moe":  # with an expert that all tokens share
        assert config.moe is not None
        config = replace(config, moe=replace(config.moe, shared_size=20))
    return config


STEPS = 3


def train(
    layout: str, model: str, dtype: str = "fp64", options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """(loss, norm) of each step, each step's gradients, the final masters and moments."""
    run = Run(
        layout, model_config(model), dtype, moe=MOE.get(model, MoESection()), **(options or {})
    )
    gradients: list[dict[str, torch.Tensor]] = []
    reduce = run.axis.reduce

    def recorded() -> None:
        reduce()
        masters = run.axis.masters()
        gradients.append(whole({n: masters[n].like(g) for n, g in run.axis.gradients().items()}))

    run.axis.reduce = recorded  # type: ignore[method-assign]
    rows = run.steps(0, STEPS, micro_batch=1)
    return {"rows": rows, "gradients": gradients, "state": run.state()}
