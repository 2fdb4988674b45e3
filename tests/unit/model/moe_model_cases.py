"""Small mixtures of experts with random weights."""

from __future__ import annotations

from typing import Any

import torch

from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.moe import MixtureOfExperts

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 12, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 12, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "q_lora_rank": 10, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    },
}  # fmt: skip
FAMILIES = list(OWN)


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **OWN[family], **changes}


def config(family: str, **changes: Any) -> ModelConfig:
    return parse_config(hf_config(family, **changes))


def decoder(
    family: str, seed: int = 0, dtype: torch.dtype | None = None, **changes: Any
) -> Decoder:
    """Random weights; norms and biases too, which start constant."""
    model = Decoder(config(family, **changes))
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model if dtype is None else model.to(dtype)


def mixtures(model: Decoder) -> list[MixtureOfExperts]:
    return [m for m in model.modules() if isinstance(m, MixtureOfExperts)]


def mixture(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> MixtureOfExperts:
    return mixtures(decoder(family, dtype=dtype, **changes))[0]


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
