"""Published models by the numbers of their config.json, a line each."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _dense(
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int,
    positions: int, theta: float = 10_000.0, tied: bool = False, **more: Any,
) -> Config:  # fmt: skip
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5 if kind in ("llama", "mistral") else 1e-6,
        **more,
    }


def _llama3(hidden: int, inner: int, layers: int, heads: int, kv: int = 8) -> Config:
    return _dense("llama", hidden, inner, layers, heads, kv, 128_256, 8192, 500_000.0)


def _llama31(
    hidden: int, inner: int, layers: int, heads: int, kv: int = 8, factor: float = 8.0,
    tied: bool = False, **more: Any,
) -> Config:  # fmt: skip
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return _dense(
        "llama", hidden, inner, layers, heads, kv, 128_256, 131_072, 500_000.0, tied,
        rope_scaling=scaling, **more,
    )  # fmt: skip


def _qwen25(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int = 152_064,
    tied: bool = False,
) -> Config:  # fmt: skip
    return _dense(
        "qwen2", hidden, inner, layers, heads, kv, vocabulary, 131_072, 1e6, tied,
        use_sliding_window=False,
    )  # fmt: skip


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, kv: int = 8, tied: bool = False
) -> Config:
    return _dense(
        "qwen3", hidden, inner, layers, heads, kv, 151_936, 40_960, 1e6, tied, head_dim=128
    )


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, kv: int, expert: int) -> Config:
    return _dense(
        "qwen3_moe", hidden, inner, layers, heads, kv, 151_936, 40_960, 1e6, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=expert, norm_topk_prob=True,
    )  # fmt: skip


def _mixtral(hidden: int, inner: int, layers: int, heads: int, positions: int) -> Config:
    return _dense(
        "mixtral", hidden, inner, layers, heads, 8, 32_000, positions, 1e6,
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def _gemma3(
    hidden: int, inner: int, layers: int, heads: int, kv: int, head: int, window: int,
    vocabulary: int = 262_208, positions: int = 131_072, scalar: int | None = None,
) -> Config:  # fmt: skip
    return _dense(
        "gemma3_text", hidden, inner, layers, heads, kv, vocabulary, positions, 1e6, True,
        head_dim=head, sliding_window=window, query_pre_attn_scalar=scalar or head,
    )  # fmt: skip


_YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _latent(
    kind: str, hidden: int, inner: int, layers: int, heads: int, experts: int, expert: int,
    top_k: int, shared: int, dense: int, query_rank: int | None, groups: tuple[int, int],
    vocabulary: int, scale: float, **more: Any,
) -> Config:  # fmt: skip
    return {
        **_dense(kind, hidden, inner, layers, heads, heads, vocabulary, 163_840),
        "n_routed_experts": experts, "moe_intermediate_size": expert, "num_experts_per_tok": top_k,
        "n_shared_experts": shared, "first_k_dense_replace": dense, "moe_layer_freq": 1,
        "n_group": groups[0], "topk_group": groups[1], "routed_scaling_factor": scale,
        "q_lora_rank": query_rank, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_scaling": _YARN, **more,
    }  # fmt: skip


_DEEPSEEK_V3 = _latent(
    "deepseek_v3", 7168, 18_432, 61, 128, 256, 2048, 8, 1, 3, 1536, (8, 4), 129_280, 2.5,
    topk_method="noaux_tc", norm_topk_prob=True,
)  # fmt: skip

_HF = "config.json of huggingface.co/"

# name: (config.json, where it is from)
PUBLISHED: dict[str, tuple[Config, str]] = {
    "smollm2-135m": (
        _dense("llama", 576, 1536, 30, 9, 3, 49_152, 8192, 100_000.0, True),
        f"{_HF}HuggingFaceTB/SmolLM2-135M",
    ),
    "smollm2-360m": (
        _dense("llama", 960, 2560, 32, 15, 5, 49_152, 8192, 100_000.0, True),
        f"{_HF}HuggingFaceTB/SmolLM2-360M",
    ),
    "smollm2-1.7b": (
        _dense("llama", 2048, 8192, 24, 32, 32, 49_152, 8192, 130_000.0, True),
        f"{_HF}HuggingFaceTB/SmolLM2-1.7B",
    ),
    "llama-7b": (
        _dense("llama", 4096, 11_008, 32, 32, 32, 32_000, 2048), "Touvron et al. 2023 (2302.13971)",
    ),
    "llama-13b": (
        _dense("llama", 5120, 13_824, 40, 40, 40, 32_000, 2048), "Touvron et al. 2023 (2302.13971)",
    ),
    "llama-33b": (
        _dense("llama", 6656, 17_920, 60, 52, 52, 32_000, 2048), "Touvron et al. 2023 (2302.13971)",
    ),
    "llama-65b": (
        _dense("llama", 8192, 22_016, 80, 64, 64, 32_000, 2048), "Touvron et al. 2023 (2302.13971)",
    ),
    "llama-2-7b": (
        _dense("llama", 4096, 11_008, 32, 32, 32, 32_000, 4096), f"{_HF}meta-llama/Llama-2-7b-hf",
    ),
    "llama-2-13b": (
        _dense("llama", 5120, 13_824, 40, 40, 40, 32_000, 4096), f"{_HF}meta-llama/Llama-2-13b-hf",
    ),
    "llama-2-70b": (
        _dense("llama", 8192, 28_672, 80, 64, 8, 32_000, 4096), f"{_HF}meta-llama/Llama-2-70b-hf",
    ),
    "llama-3-8b": (_llama3(4096, 14_336, 32, 32), f"{_HF}meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": (_llama3(8192, 28_672, 80, 64), f"{_HF}meta-llama/Meta-Llama-3-70B"),
    "llama-3.1-8b": (_llama31(4096, 14_336, 32, 32), f"{_HF}meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": (_llama31(8192, 28_672, 80, 64), f"{_HF}meta-llama/Llama-3.1-70B"),
    "llama-3.1-405b": (_llama31(16_384, 53_248, 126, 128), f"{_HF}meta-llama/Llama-3.1-405B"),
    "llama-3.2-1b": (
        _llama31(2048, 8192, 16, 32, factor=32.0, tied=True, head_dim=64),
        f"{_HF}meta-llama/Llama-3.2-1B",
    ),
    "llama-3.2-3b": (
        _llama31(3072, 8192, 28, 24, factor=32.0, tied=True, head_dim=128),
        f"{_HF}meta-llama/Llama-3.2-3B",
    ),
    "llama-3.3-70b": (_llama31(8192, 28_672, 80, 64), f"{_HF}meta-llama/Llama-3.3-70B-Instruct"),
    "mistral-7b": (
        _dense(
            "mistral", 4096, 14_336, 32, 32, 8, 32_000, 32_768, sliding_window=4096
        ),
        f"{_HF}mistralai/Mistral-7B-v0.1",
    ),
    "qwen2.5-0.5b": (_qwen25(896, 4864, 24, 14, 2, 151_936, True), f"{_HF}Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": (_qwen25(1536, 8960, 28, 12, 2, 151_936, True), f"{_HF}Qwen/Qwen2.5-1.5B"),
    "qwen2.5-3b": (_qwen25(2048, 11_008, 36, 16, 2, 151_936, True), f"{_HF}Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": (_qwen25(3584, 18_944, 28, 28, 4), f"{_HF}Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": (_qwen25(5120, 13_824, 48, 40, 8), f"{_HF}Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": (_qwen25(5120, 27_648, 64, 40, 8), f"{_HF}Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": (_qwen25(8192, 29_568, 80, 64, 8), f"{_HF}Qwen/Qwen2.5-72B"),
    "qwen3-0.6b": (_qwen3(1024, 3072, 28, 16, tied=True), f"{_HF}Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": (_qwen3(2048, 6144, 28, 16, tied=True), f"{_HF}Qwen/Qwen3-1.7B"),
    "qwen3-4b": (_qwen3(2560, 9728, 36, 32, tied=True), f"{_HF}Qwen/Qwen3-4B"),
    "qwen3-8b": (_qwen3(4096, 12_288, 36, 32), f"{_HF}Qwen/Qwen3-8B"),
    "qwen3-14b": (_qwen3(5120, 17_408, 40, 40), f"{_HF}Qwen/Qwen3-14B"),
    "qwen3-32b": (_qwen3(5120, 25_600, 64, 64), f"{_HF}Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (_qwen3_moe(2048, 6144, 48, 32, 4, 768), f"{_HF}Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (_qwen3_moe(4096, 12_288, 94, 64, 4, 1536), f"{_HF}Qwen/Qwen3-235B-A22B"),
    "mixtral-8x7b": (_mixtral(4096, 14_336, 32, 32, 32_768), f"{_HF}mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": (_mixtral(6144, 16_384, 56, 48, 65_536), f"{_HF}mistralai/Mixtral-8x22B-v0.1"),
    "deepseek-v2-lite": (
        _latent(
            "deepseek_v2", 2048, 10_944, 27, 16, 64, 1408, 6, 2, 1, None, (1, 1), 102_400, 1.0,
            topk_method="greedy",
        ),
        f"{_HF}deepseek-ai/DeepSeek-V2-Lite",
    ),
    "deepseek-v2": (
        _latent(
            "deepseek_v2", 5120, 12_288, 60, 128, 160, 1536, 6, 2, 1, 1536, (8, 3), 102_400, 16.0,
            topk_method="group_limited_greedy",
        ),
        f"{_HF}deepseek-ai/DeepSeek-V2",
    ),
    "deepseek-v3": (_DEEPSEEK_V3, f"{_HF}deepseek-ai/DeepSeek-V3"),
    "deepseek-r1": (_DEEPSEEK_V3, f"{_HF}deepseek-ai/DeepSeek-R1"),
    "kimi-k2": (
        _latent(
            "kimi_k2", 7168, 18_432, 61, 64, 384, 2048, 8, 1, 1, 1536, (1, 1), 163_840, 2.827,
            topk_method="noaux_tc", norm_topk_prob=True,
        ),
        f"{_HF}moonshotai/Kimi-K2-Base",
    ),
    "gemma-3-1b": (
        _gemma3(1152, 6912, 26, 4, 1, 256, 512, 262_144, 32_768), f"{_HF}google/gemma-3-1b-pt",
    ),
    "gemma-3-4b": (
        _gemma3(2560, 10_240, 34, 8, 4, 256, 1024), f"text part of {_HF}google/gemma-3-4b-pt",
    ),
    "gemma-3-12b": (
        _gemma3(3840, 15_360, 48, 16, 8, 256, 1024), f"text part of {_HF}google/gemma-3-12b-pt",
    ),
    "gemma-3-27b": (
        _gemma3(5376, 21_504, 62, 32, 16, 128, 1024, scalar=168),
        f"text part of {_HF}google/gemma-3-27b-pt",
    ),
    "llama-4-scout": (
        _dense(
            "llama4_text", 5120, 8192, 48, 40, 8, 202_048, 10_485_760, 500_000.0, head_dim=128,
            intermediate_size_mlp=16_384, num_local_experts=16, num_experts_per_tok=1,
            interleave_moe_layer_step=1, attention_chunk_size=8192,
        ),
        f"text part of {_HF}meta-llama/Llama-4-Scout-17B-16E",
    ),
    "llama-4-maverick": (
        _dense(
            "llama4_text", 5120, 8192, 48, 40, 8, 202_048, 1_048_576, 500_000.0, head_dim=128,
            intermediate_size_mlp=16_384, num_local_experts=128, num_experts_per_tok=1,
            interleave_moe_layer_step=2, attention_chunk_size=8192,
        ),
        f"text part of {_HF}meta-llama/Llama-4-Maverick-17B-128E",
    ),
    "gpt-oss-20b": (
        _dense(
            "gpt_oss", 2880, 2880, 24, 64, 8, 201_088, 131_072, 150_000.0, head_dim=64,
            num_local_experts=32, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
        ),
        f"{_HF}openai/gpt-oss-20b",
    ),
    "gpt-oss-120b": (
        _dense(
            "gpt_oss", 2880, 2880, 36, 64, 8, 201_088, 131_072, 150_000.0, head_dim=64,
            num_local_experts=128, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
        ),
        f"{_HF}openai/gpt-oss-120b",
    ),
    "minimax-m2": (
        _dense(
            "minimax_m2", 3072, 1536, 62, 48, 8, 200_064, 196_608, 5e6, head_dim=128,
            num_local_experts=256, num_experts_per_tok=8, use_qk_norm=True,
        ),
        f"{_HF}MiniMaxAI/MiniMax-M2",
    ),
    "qwen3.5-397b-a17b": (
        _dense(
            "qwen3_5_moe", 4096, 1024, 60, 32, 2, 248_320, 262_144, 1e7, head_dim=256,
            num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024, full_attention_interval=4,
            linear_num_value_heads=64, linear_num_key_heads=16, linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
        f"{_HF}Qwen/Qwen3.5-397B-A17B",
    ),
}  # fmt: skip

ALIASES: dict[str, str] = {
    "smollm2": "smollm2-135m",
    "gpt-3": "gpt3-175b",
    "gpt3": "gpt3-175b",
    "gpt-3-175b": "gpt3-175b",
    "gpt2": "gpt2-124m",
    "mt-nlg-530b": "megatron-530b",
    "megatron-1t": "megatron-1008b",
    "kimi-k2.5": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
    "minimax-m2.1": "minimax-m2",
    "minimax-m2.5": "minimax-m2",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "deepseek": "deepseek-v3",
    "mixtral": "mixtral-8x7b",
    "llama-30b": "llama-33b",
}
