"""Families that fivefold does not run, as near as its decoder comes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fivefold.core.errors import PlanError
from fivefold.model.config import ModelConfig, MoEConfig
from fivefold.model.families import parse_config
from fivefold.plan.models.gpt import gpt
from fivefold.plan.shape import ModelShape

Config = Mapping[str, Any]


def like(hf: Config, family: str, **changes: Any) -> ModelConfig:
    """The config as `family` of fivefold reads it."""
    return parse_config({**hf, "model_type": family, **changes})


def _gpt2(hf: Config, name: str) -> ModelShape:
    sizes = {}
    for ours, theirs in (("layers", "n_layer"), ("hidden", "n_embd"), ("heads", "n_head")):
        if not isinstance(hf.get(theirs), int):
            raise PlanError(f"{name}: the gpt2 config has no `{theirs}`", "add it to the config")
        sizes[ours] = hf[theirs]
    return gpt(
        name,
        **sizes,
        vocabulary=hf.get("vocab_size") or 50_257,
        positions=hf.get("n_positions") or 1024,
        intermediate=hf.get("n_inner"),
    )


def _kimi(hf: Config, name: str) -> ModelShape:
    return ModelShape(name, like(hf, "deepseek_v3"), notes=("Kimi K2 is read as DeepSeek-V3",))


def _deepseek_v32(hf: Config, name: str) -> ModelShape:
    note = (
        "DeepSeek-V3.2's indexer is left out, and its sparse attention reads every key: "
        f"long contexts look slower than top {hf.get('index_topk', 2048)} makes them"
    )
    return ModelShape(name, like(hf, "deepseek_v3"), notes=(note,), runs=False)


def _gpt_oss(hf: Config, name: str) -> ModelShape:
    """Experts on every layer; every second layer looks back a window."""
    experts = {**hf, "attention_bias": True, "sliding_window": None}
    experts["num_experts_per_tok"] = hf.get("num_experts_per_tok") or hf.get("experts_per_token")
    config = like(experts, "mixtral")
    types = hf.get("layer_types") or ["sliding_attention", "full_attention"] * config.num_layers
    window = hf.get("sliding_window") or 128
    return ModelShape(
        name,
        replace(
            config,
            qkv_bias=True,
            output_bias=True,
            windows=tuple(
                window if kind == "sliding_attention" else None
                for kind in types[: config.num_layers]
            ),
        ),
        notes=("biases of experts and routers, and attention sinks, are left out",),
        runs=False,
    )


def _minimax(hf: Config, name: str) -> ModelShape:
    config = like({**hf, "sliding_window": None}, "mixtral")
    assert config.moe is not None
    moe = replace(config.moe, score="sigmoid", correction_bias=True)
    return ModelShape(
        name,
        replace(config, moe=moe, qk_norm=bool(hf.get("use_qk_norm", True))),
        notes=("half of a head turns with position there, all of it here; norms are of heads",),
        runs=False,
    )


def _qwen_hybrid(hf: Config, name: str) -> ModelShape:
    """Qwen3-Next and Qwen3.5: three layers of gated delta rule to one of gated attention."""
    settings = {**hf, "num_experts_per_tok": hf.get("num_experts_per_tok") or 10}
    settings["use_sliding_window"] = False
    settings.pop("rope_parameters", None)
    sparse = bool(hf.get("num_experts"))
    if sparse:
        settings.setdefault("intermediate_size", hf.get("moe_intermediate_size"))
    config = like(settings, "qwen3_moe" if sparse else "qwen3", rope_scaling=None)
    shared = hf.get("shared_expert_intermediate_size") or 0
    moe = None if config.moe is None else replace(config.moe, shared_size=shared)
    # The gate of attention is as wide as the queries: its matrix is as large as a third one of
    # query and output. Half as many heads again have its elements.
    heads = config.num_heads * 3 // 2
    every = hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types")
    linear = tuple(
        kinds[layer] == "linear_attention" if kinds else (layer + 1) % every != 0
        for layer in range(config.num_layers)
    )
    window = _state_as_window(hf, config)
    return ModelShape(
        name,
        replace(
            config,
            moe=moe,
            num_heads=heads,
            windows=tuple(window if is_linear else None for is_linear in linear),
        ),
        notes=(
            f"linear attention is taken for attention over {window} tokens, whose keys and values "
            "are as large as its state",
            f"the gate of attention is counted as {heads - config.num_heads} heads more",
        ),
        runs=False,
    )


def _state_as_window(hf: Config, config: ModelConfig) -> int:
    """Tokens whose keys and values have as many elements as the state of a linear layer."""
    heads, key = hf.get("linear_num_value_heads") or 32, hf.get("linear_key_head_dim") or 128
    state = heads * key * (hf.get("linear_value_head_dim") or 128)
    return max(1, state // (2 * config.num_kv_heads * config.head_dim))


def _gemma2(hf: Config, name: str) -> ModelShape:
    config = like({**hf, "rope_parameters": None, "rope_scaling": None}, "gemma3_text")
    layers = range(config.num_layers)
    window = hf.get("sliding_window") or 4096
    return ModelShape(
        name,
        replace(
            config,
            qk_norm=False,
            windows=tuple(None if layer % 2 else window for layer in layers),
            ropes=(replace(config.ropes[-1], theta=10_000.0),) * config.num_layers,
            attention_softcap=hf.get("attn_logit_softcapping"),
        ),
        notes=("Gemma 2 is read as Gemma 3 without norms of heads",),
        runs=False,
    )


def _glm4_moe(hf: Config, name: str) -> ModelShape:
    """GLM-4.5: grouped-query attention, experts chosen like DeepSeek-V3's."""
    config = like(
        {**hf, "num_experts": hf.get("n_routed_experts"), "sliding_window": None}, "qwen3_moe",
        rope_scaling=None,
    )  # fmt: skip
    assert config.moe is not None
    dense = hf.get("first_k_dense_replace") or 0
    moe = MoEConfig(
        experts=config.moe.experts,
        top_k=config.moe.top_k,
        expert_size=config.moe.expert_size,
        sparse=(False,) * dense + (True,) * (config.num_layers - dense),
        shared_size=(hf.get("n_shared_experts") or 0) * config.moe.expert_size,
        score="sigmoid",
        normalise=True,
        correction_bias=True,
    )
    return ModelShape(
        name,
        replace(
            config,
            moe=moe,
            qk_norm=bool(hf.get("use_qk_norm")),
            qkv_bias=bool(hf.get("attention_bias")),
            output_bias=False,
        ),
        notes=("part of a head turns with position there, all of it here",),
        runs=False,
    )


def _llama4(hf: Config, name: str) -> ModelShape:
    """Experts on every n-th layer, beside one that all tokens pass; three layers of four see a chunk."""
    inner = hf.get("intermediate_size")
    config = like(
        {**hf, "intermediate_size": hf.get("intermediate_size_mlp") or inner, "rope_scaling": None,
         "rope_parameters": None},
        "llama",
    )  # fmt: skip
    every = hf.get("interleave_moe_layer_step") or 1
    layers = range(config.num_layers)
    for field in ("num_local_experts", "intermediate_size"):
        if not isinstance(hf.get(field), int):
            raise PlanError(f"{name}: the llama4 config has no `{field}`", "add it to the config")
    moe = MoEConfig(
        experts=hf["num_local_experts"],
        top_k=hf.get("num_experts_per_tok") or 1,
        expert_size=hf["intermediate_size"],
        sparse=tuple((layer + 1) % every == 0 for layer in layers),
        shared_size=hf["intermediate_size"],
        score="sigmoid",
    )
    chunk = hf.get("attention_chunk_size") or 8192
    windows = tuple(None if (layer + 1) % 4 == 0 else chunk for layer in layers)
    return ModelShape(
        name,
        replace(config, moe=moe, windows=windows),
        notes=(
            f"chunks of {chunk} tokens are taken for windows of as many, and every layer has rotary "
            "positions",
        ),
        runs=False,
    )


# model_type: how it is read.
NEAR: dict[str, Callable[[Config, str], ModelShape]] = {
    "gpt2": _gpt2,
    "kimi_k2": _kimi,
    "kimi_k25": _kimi,
    "deepseek_v32": _deepseek_v32,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax,
    "minimax": _minimax,
    "qwen3_next": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "gemma2": _gemma2,
    "glm4_moe": _glm4_moe,
    "llama4": _llama4,
    "llama4_text": _llama4,
}
