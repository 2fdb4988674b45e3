"""Counts of parameters: those of the real decoder, of the papers, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.plan.models import parameters, shape
from fivefold.plan.models.count import layer_parameters, outer_parameters
from fivefold.plan.models.gpt import gpt
from fivefold.plan.models.parse import names, published
from fivefold.plan.shape import ModelShape

RUNNING = [name for name in names() if published(name).runs]
# What each name of the decoder's parameters belongs to; the first that is found in it.
COMPONENTS = (
    ("norm", "norms"), ("embedding", "embedding"), ("head.", "head"), (".shared.", "shared_experts"),
    (".experts.", "experts"), (".router.", "router"), (".attention.", "attention"),
    (".feed_forward.", "feed_forward"),
)  # fmt: skip


# Switches that no published model has on, on top of one that is published.
SWITCHES = [
    ("llama-2-7b", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    ("qwen3-30b-a3b", {"qkv_bias": True, "output_bias": True}),
    ("deepseek-v3", {"qkv_bias": True, "output_bias": True}),
    ("deepseek-v2-lite", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    ("mixtral-8x7b", {"tie_embeddings": True}),
    ("gemma-3-4b", {"tie_embeddings": False, "qkv_bias": True}),
]


@pytest.mark.parametrize("name", RUNNING)
def test_counts_are_those_of_the_decoder(name: str) -> None:
    held_to_the_decoder(published(name))


@pytest.mark.parametrize(("name", "switches"), SWITCHES)
def test_counts_with_other_switches(name: str, switches: dict[str, bool]) -> None:
    model = published(name)
    held_to_the_decoder(replace(model, config=replace(model.config, **switches)))


def held_to_the_decoder(model: ModelShape) -> None:
    from fivefold.model.decoder import Decoder

    config = model.config
    keep = min(config.num_layers, 4)  # one of each kind of layer is in the first four
    few = replace(
        model,
        config=replace(
            config,
            num_layers=keep,
            windows=config.windows[:keep],
            ropes=config.ropes[:keep],
            moe=config.moe and replace(config.moe, sparse=config.moe.sparse[:keep]),
        ),
    )
    found: dict[str, int] = {}
    for key, parameter in Decoder(few.config, device="meta").named_parameters():
        component = next(what for part, what in COMPONENTS if part in key)
        found[component] = found.get(component, 0) + parameter.numel()
    counted = {key: value for key, value in parameters(few).by_component().items() if value}
    assert counted == found


# Billions that the papers and model cards state (of DeepSeek-V3 and Kimi K2 without the layers for
# multi-token prediction), all and active.
STATED = [
    ("llama-2-7b", 6.738, 6.738), ("llama-2-70b", 68.977, 68.977), ("llama-3.1-8b", 8.030, 8.030),
    ("llama-3.1-70b", 70.554, 70.554), ("llama-3.1-405b", 405.853, 405.853),
    ("qwen2.5-7b", 7.616, 7.616), ("qwen2.5-72b", 72.706, 72.706), ("qwen3-32b", 32.762, 32.762),
    ("qwen3-30b-a3b", 30.532, 3.353), ("qwen3-235b-a22b", 235.094, 22.19),
    ("mixtral-8x7b", 46.703, 12.88), ("mixtral-8x22b", 140.62, 39.15),
    ("deepseek-v2", 235.741, 21.4), ("deepseek-v3", 671.026, 37.55), ("kimi-k2", 1026.4, 32.9),
    ("gemma-3-27b", 27.009, 27.009), ("smollm2-135m", 0.1345, 0.1345), ("gpt2-xl", 1.558, 1.558),
    ("gpt3-175b", 174.6, 174.6), ("gpt-oss-20b", 20.9, 4.19), ("gpt-oss-120b", 116.8, 5.7),
    ("llama-4-scout", 107.77, 17.2), ("llama-4-maverick", 400.7, 17.2),
    ("minimax-m2", 228.7, 11.03), ("qwen3.5-397b-a17b", 396.4, 17.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "total", "active"), STATED)
def test_counts_are_those_that_are_stated(name: str, total: float, active: float) -> None:
    counted = parameters(published(name))
    assert counted.total / 1e9 == pytest.approx(total, rel=0.004)
    assert counted.active / 1e9 == pytest.approx(active, rel=0.025)


def test_seven_billion_by_hand() -> None:
    """Hidden 4096, 32 heads, 32 layers, vocabulary 32000: every term of the sum."""
    found = parameters(shape("7B"))
    assert found.embedding == found.head == 32_000 * 4096
    assert found.attention == 32 * 4 * 4096 * 4096
    assert found.feed_forward == 32 * 3 * 4096 * 11_008
    assert found.norms == (2 * 32 + 1) * 4096
    assert found.total == 6_738_415_616


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("megatron-1.7b", 1.7), ("megatron-3.6b", 3.6), ("megatron-7.5b", 7.5),
        ("megatron-18.4b", 18.4), ("megatron-39.1b", 39.1), ("megatron-76.1b", 76.1),
        ("megatron-145.6b", 145.6), ("megatron-310.1b", 310.1), ("megatron-530b", 529.6),
        ("megatron-1008b", 1008.0),
    ],
)  # fmt: skip
def test_megatron_by_its_formula(name: str, billions: float) -> None:
    """SC21's equation 2: 12 L D^2 (1 + 13 / (12 D) + (V + S) / (12 L D)), and the last norm."""
    model = published(name)
    layers, hidden = model.config.num_layers, model.config.hidden_size
    by_formula = 12 * layers * hidden**2 + 13 * layers * hidden + (51_200 + 2048) * hidden
    assert parameters(model).total == by_formula + 2 * hidden
    assert parameters(model).total / 1e9 == pytest.approx(billions, rel=0.004, abs=0.06)


def test_parts_add_up() -> None:
    model = shape("deepseek-v3")
    summed = outer_parameters(model)
    for layer in range(61):
        summed += layer_parameters(model, layer)
    assert summed == parameters(model)
    assert layer_parameters(model, 2).experts == 0 and layer_parameters(model, 3).experts > 0
    assert layer_parameters(model, 3).active_experts * 32 == layer_parameters(model, 3).experts


def test_gpt_by_hand() -> None:
    found = parameters(gpt("g", 2, 64, 4, vocabulary=100, positions=32))
    assert found.attention == 2 * (4 * 64 * 64 + 4 * 64)
    assert found.feed_forward == 2 * (8 * 64 * 64 + 5 * 64)
    assert found.norms == 5 * 128 and found.positions == 32 * 64 and found.head == 0


def test_counts_of_real_configs(shared_data: Path) -> None:
    """The catalogue has the numbers of the config.json that models were published with."""
    pairs = {
        "aiconfigurator/Qwen--Qwen3-32B_config.json": "qwen3-32b",
        "aiconfigurator/Qwen--Qwen3-8B_config.json": "qwen3-8b",
        "aiconfigurator/Qwen--Qwen3-0.6B_config.json": "qwen3-0.6b",
        "aiconfigurator/Qwen--Qwen3-1.7B_config.json": "qwen3-1.7b",
        "aiconfigurator/Qwen--Qwen3-30B-A3B_config.json": "qwen3-30b-a3b",
        "aiconfigurator/Qwen--Qwen3-235B-A22B_config.json": "qwen3-235b-a22b",
        "aiconfigurator/deepseek-ai--DeepSeek-V3_config.json": "deepseek-v3",
        "aiconfigurator/deepseek-ai--DeepSeek-R1_config.json": "deepseek-r1",
        "aiconfigurator/meta-llama--Meta-Llama-3.1-8B_config.json": "llama-3.1-8b",
        "aiconfigurator/meta-llama--Meta-Llama-3.1-70B_config.json": "llama-3.1-70b",
        "aiconfigurator/meta-llama--Meta-Llama-3.1-405B_config.json": "llama-3.1-405b",
        "aiconfigurator/mistralai--Mixtral-8x7B-v0.1_config.json": "mixtral-8x7b",
        "aiconfigurator/mistralai--Mixtral-8x22B-v0.1_config.json": "mixtral-8x22b",
        "aiconfigurator/openai--gpt-oss-20b_config.json": "gpt-oss-20b",
        "ome/qwen2.5_0.5b.json": "qwen2.5-0.5b",
        "ome/qwen2.5_1.5b.json": "qwen2.5-1.5b",
        "ome/qwen2.5_3b.json": "qwen2.5-3b",
        "ome/qwen2.5_7b.json": "qwen2.5-7b",
        "ome/qwen2.5_14b.json": "qwen2.5-14b",
        "ome/qwen2.5_32b.json": "qwen2.5-32b",
        "ome/qwen2.5_72b.json": "qwen2.5-72b",
        "ome/qwen3_4b.json": "qwen3-4b",
        "ome/llama3.json": "llama-3-70b",
        "ome/llama3_2_1b.json": "llama-3.2-1b",
        "ome/llama3_2_3b.json": "llama-3.2-3b",
        "ome/gemma3.json": "gemma-3-27b",
        "ome/gemma3_text.json": "gemma-3-1b",
        "ome/mistral.json": "mistral-7b",
        "transcribed/SmolLM2-135M_config.json": "smollm2-135m",
        "transcribed/Llama-2-7b-hf_config.json": "llama-2-7b",
    }
    for file, name in pairs.items():
        real, ours = shape(shared_data / "hf-configs" / file), published(name)
        assert parameters(real) == parameters(ours), name
        for field in ("num_heads", "num_kv_heads", "head_dim", "num_layers", "mla", "moe"):
            assert getattr(real.config, field) == getattr(ours.config, field), (name, field)
