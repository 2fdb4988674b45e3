"""Qwen3 mixtures (Yang et al. 2025): Qwen3's attention, experts without a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig, MoEConfig
from fivefold.model.families import common, fields
from fivefold.model.families.experts import check_experts


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `qwen3_moe` config.json. With `use_sliding_window`, every layer has the window."""
    shapes = common.shapes(hf)
    layers = shapes["num_layers"]
    bias = fields.flag(hf, "attention_bias")
    # transformers 5 writes the number of experts under its own name.
    count = hf.get("num_experts") or hf.get("num_local_experts")
    moe = MoEConfig(
        experts=fields.required({**hf, "num_experts": count}, "num_experts"),
        top_k=fields.required({"num_experts_per_tok": 8, **hf}, "num_experts_per_tok"),
        expert_size=fields.required(hf, "moe_intermediate_size"),
        sparse=_sparse(hf, layers),
        normalise=fields.flag(hf, "norm_topk_prob"),
    )
    check_experts(moe)
    window = fields.window(hf) if fields.flag(hf, "use_sliding_window") else None
    return ModelConfig(
        **shapes,
        windows=(window,) * layers,
        ropes=(common.rope(hf),) * layers,
        tie_embeddings=fields.flag(hf, "tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        activation=common.activation(hf, "hidden_act", "silu"),
        moe=moe,
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Write a `qwen3_moe` config.json."""
    moe = config.moe
    assert moe is not None, "the family is one of mixtures"
    return {
        **common.export_shapes(config, "Qwen3MoeForCausalLM"),
        **common.export_rope(config.ropes[0]),
        "use_sliding_window": config.windows[0] is not None,
        "sliding_window": config.windows[0],
        "max_window_layers": config.num_layers,
        "attention_bias": config.qkv_bias,
        "hidden_act": common.EXPORTED_ACTIVATIONS[config.activation],
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(moe.sparse) if not sparse],
    }


def _sparse(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, less those of `mlp_only_layers`."""
    every = fields.whole(hf, "decoder_sparse_step") or 1
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise WeightsError(
            f"`mlp_only_layers` of the model's config is {dense!r}", "use a list of layer numbers"
        )
    return tuple((layer + 1) % every == 0 and layer not in dense for layer in range(layers))
