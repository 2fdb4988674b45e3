"""config.json in and out: every published one at hand, both spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_cases import FAMILIES, OWN, SIZES, config, families, held

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import FAMILIES as COVERED
from fivefold.model.families import export_config, parse_config, weight_names

# Parameters as the models' own cards and papers count them.
PUBLISHED = {
    "Llama-2-7b-hf_config.json": 6_738_415_616,
    "SmolLM2-135M_config.json": 134_515_008,
    "Qwen--Qwen3-0.6B_config.json": 596_049_920,
    "Qwen--Qwen3-1.7B_config.json": 1_720_574_976,
    "qwen3_4b.json": 4_022_468_096,
    "Qwen--Qwen3-8B_config.json": 8_190_735_360,
    "Qwen--Qwen3-32B_config.json": 32_762_123_264,
    "meta-llama--Meta-Llama-3.1-8B_config.json": 8_030_261_248,
    "meta-llama--Meta-Llama-3.1-70B_config.json": 70_553_706_496,
    "meta-llama--Meta-Llama-3.1-405B_config.json": 405_853_388_800,
    "llama3_2_1b.json": 1_235_814_400,
    "llama3_2_3b.json": 3_212_749_824,
    "qwen2.5_0.5b.json": 494_032_768,
    "qwen2.5_1.5b.json": 1_543_714_304,
    "qwen2.5_3b.json": 3_085_938_688,
    "qwen2.5_7b.json": 7_615_616_512,
    "qwen2.5_14b.json": 14_770_033_664,
    "qwen2.5_32b.json": 32_763_876_352,
    "qwen2.5_72b.json": 72_706_203_648,
    "gemma3_text.json": 999_885_952,
}


def test_every_published_config_is_read_or_refused_by_name(shared_data: Path) -> None:
    files = sorted((shared_data / "hf-configs").glob("*/*.json"))
    assert files
    counted: dict[str, int] = {}
    for file in files:
        hf = json.loads(file.read_text())
        family = hf["model_type"]
        if family not in COVERED and family != "gemma3":
            with pytest.raises(WeightsError, match=f"'{family}' is not covered"):
                parse_config(hf)
            continue
        parsed = parse_config(hf)
        model = Decoder(parsed, device="meta")
        counted[file.name] = sum(p.numel() for p in model.parameters())
        assert set(weight_names(parsed)) == set(model.state_dict())
        assert parse_config(export_config(parsed)) == parsed
    assert {name: counted.get(name) for name in PUBLISHED} == PUBLISHED


def test_gemma_3_27b_is_read_from_its_multimodal_config(shared_data: Path) -> None:
    parsed = parse_config(json.loads((shared_data / "hf-configs/ome/gemma3.json").read_text()))
    assert parsed.family == "gemma3_text"
    assert parsed.windows[:7] == (1024,) * 5 + (None, 1024)
    assert parsed.ropes[0] == RopeConfig(theta=10_000.0)
    assert parsed.ropes[5] == RopeConfig(theta=1_000_000.0, kind="linear", factor=8.0)
    assert parsed.attention_scale == 168**-0.5
    assert parsed.eos_token_ids == (1, 106)
    assert (parsed.num_heads, parsed.num_kv_heads) == (32, 16)


def test_llama_3_2_is_read(shared_data: Path) -> None:
    parsed = parse_config(json.loads((shared_data / "hf-configs/ome/llama3_2_1b.json").read_text()))
    assert parsed.ropes == (
        RopeConfig(
            theta=500_000.0,
            kind="llama3",
            factor=32.0,
            original_positions=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ) * 16  # fmt: skip
    assert parsed.tie_embeddings
    assert parsed.head_dim == 64


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, "truncate": False},
]


@held
@given(families, st.sampled_from([None, *SCALINGS]), st.booleans(), st.integers(1, 7), st.data())
def test_export_is_read_back_equal(
    family: str, scaling: dict[str, Any] | None, tied: bool, layers: int, data: st.DataObject
) -> None:
    given_config = config(
        family,
        rope_scaling=scaling,
        rope_theta=data.draw(st.sampled_from([1e4, 5e5])),
        tie_word_embeddings=tied,
        num_hidden_layers=layers,
        eos_token_id=data.draw(st.sampled_from([None, 3, [3, 5]])),
        bos_token_id=data.draw(st.sampled_from([None, 0, 1])),
    )
    written = json.loads(json.dumps(export_config(given_config)))
    assert parse_config(written) == given_config


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_the_spelling_of_transformers_5_is_the_same_model(scaling: dict[str, Any] | None) -> None:
    old = {"model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": scaling}
    new = {"model_type": "llama", **SIZES}
    new["rope_parameters"] = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    assert parse_config(new) == parse_config(old)


def test_gemmas_two_spellings_are_the_same_model() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = config("gemma3_text", rope_theta=1e6, rope_scaling=linear, rope_local_base_freq=2e4)
    new = config(
        "gemma3_text",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, **linear},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
    )
    assert new == old


def test_qwen_windows() -> None:
    sizes = {**SIZES, "model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 6}
    assert parse_config(sizes).windows == (None,) * 4
    windowed = {**sizes, "use_sliding_window": True}
    assert parse_config(windowed).windows == (None,) * 4  # from layer 28 on, if unsaid
    assert parse_config({**windowed, "max_window_layers": 3}).windows == (None,) * 3 + (6,)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert parse_config({**windowed, "layer_types": kinds}).windows == (None, 6, None, 6)
    assert parse_config({**sizes, "layer_types": kinds}).windows == (None,) * 4


def test_mistral_without_a_window() -> None:
    sizes = {**SIZES, "model_type": "mistral"}
    assert parse_config({**sizes, "sliding_window": None}).windows == (None,) * 3
    assert parse_config(sizes).windows == (4096,) * 3


def test_an_original_context_length_beside_the_rope_settings_wins() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    parsed = config("llama", rope_scaling=yarn, original_max_position_embeddings=16)
    assert parsed.ropes[0].original_positions == 16


# What is wrong with a config, and words of the one line that says so.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "lama"}, "'lama' is not covered; did you mean 'llama'"),
    ("llama", {"model_type": None}, "no `model_type`"),
    ("llama", {"vocab_size": None}, "has no `vocab_size`"),
    ("llama", {"vocab_size": "61"}, "`vocab_size` of the model's config is '61'"),
    ("llama", {"num_hidden_layers": 0}, "`num_hidden_layers` of the model's config is 0"),
    ("llama", {"hidden_size": 24.0}, "`hidden_size` of the model's config is 24.0"),
    ("llama", {"hidden_size": True}, "`hidden_size` of the model's config is True"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
    ("llama", {"hidden_size": 26}, "hidden_size=26 is not a multiple of num_attention_heads=4"),
    ("llama", {"head_dim": 7}, "head_dim=7 is odd"),
    ("llama", {"rms_norm_eps": "tiny"}, "`rms_norm_eps` of the model's config is 'tiny'"),
    ("llama", {"rms_norm_eps": float("nan")}, "`rms_norm_eps` of the model's config is nan"),
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not covered"),
    ("llama", {"tie_word_embeddings": "yes"}, "`tie_word_embeddings` of the model's config"),
    ("llama", {"eos_token_id": "</s>"}, "`eos_token_id` of the model's config is '</s>'"),
    ("llama", {"rope_theta": -1.0}, "`rope_theta` of the model's config is -1.0"),
    ("llama", {"rope_scaling": "linear"}, "rope settings of the model's config are 'linear'"),
    ("llama", {"rope_scaling": {"type": "yarm"}}, "rope scaling 'yarm' is not covered"),
    ("llama", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' is not covered"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' has no `factor`"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "`factor` of the model's"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has no `low_freq_factor`"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not covered"),
    (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "mscale=1.0 is not covered",
    ),
    ("mistral", {"sliding_window": 0}, "`sliding_window` of the model's config is 0"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
    ("qwen2", {"max_window_layers": -1}, "`max_window_layers` of the model's config is -1"),
    ("gemma3_text", {"layer_types": ["linear_attention"] * 3}, "layer_types lists 3 layers of"),
    ("gemma3_text", {"sliding_window": None}, "has no `sliding_window`"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "both directions is not covered"),
    ("gemma3_text", {"final_logit_softcapping": 0.0}, "`final_logit_softcapping` of the"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "of sliding layers is not covered",
    ),
]


@pytest.mark.parametrize(("family", "changes", "words"), WRONG, ids=[w[2] for w in WRONG])
def test_a_wrong_config_is_refused_in_one_line(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        parse_config({"model_type": family, **SIZES, **OWN[family], **changes})
    assert words in str(caught.value)
    assert caught.value.mend
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_sizes_is_needed(family: str) -> None:
    parsed = parse_config({"model_type": family, **SIZES})
    assert isinstance(parsed, ModelConfig)
    assert parsed.norm_eps == 1e-6
    needed = ["hidden_size", "intermediate_size", "num_hidden_layers"]
    for field in needed:
        with pytest.raises(WeightsError, match=f"has no `{field}`"):
            parse_config({"model_type": family, **{k: v for k, v in SIZES.items() if k != field}})
