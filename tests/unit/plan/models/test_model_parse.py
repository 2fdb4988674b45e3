"""Models from files, names, sizes and numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.models import parameters, shape
from fivefold.plan.models.parse import find, names, published

LLAMA = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}  # fmt: skip


def write(folder: Path, config: dict, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    assert shape(str(path)).config == shape(str(tmp_path)).config
    assert shape(path).config.num_kv_heads == 2
    assert shape(path).name == tmp_path.name and shape(path).source == str(path)


def test_a_training_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  config:\n" + "".join(f"    {k}: {v}\n" for k, v in LLAMA.items()))
    assert shape(path).config == shape(write(tmp_path, LLAMA)).config
    path.write_text("model: llama-2-7b\n")
    assert shape(path).name == "llama-2-7b"


def test_the_model_in_the_package(tmp_path: Path) -> None:
    assert shape("smollm2").config.num_layers == 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3.1-70b", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("quickstart", "quickstart"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("GPT-3", "gpt3-175b"),
        ("gpt-3-175B", "gpt3-175b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("moonshotai/Kimi-K2.5", "kimi-k2"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert shape(text).name == name


def test_every_name_means_itself() -> None:
    assert [find(name) for name in names()] == list(names())
    assert find("GPT-3 1.3B") == "gpt3-1.3b" and find("gpt3-13b") == "gpt3-13b"


def test_every_published_model_has_a_source_and_says_what_is_approximated() -> None:
    for name in names():
        model = published(name)
        assert model.source, name
        assert model.runs or model.notes or model.config.family == "gpt", name


@pytest.mark.parametrize("text", ["125M", "350M", "1B", "3B", "7B", "13B", "20B", "34B", "70B",
                                  "100B", "175B", "500B", "1T", "2.5T"])  # fmt: skip
def test_sizes(text: str) -> None:
    wanted = float(text[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[text[-1]]
    model = shape(text)
    assert parameters(model).total == pytest.approx(wanted, rel=0.06)
    assert model.config.hidden_size % model.config.num_heads == 0
    assert model.config.num_heads % 2 == 0


def test_thirteen_billion_is_the_known_one() -> None:
    config = shape("13B").config
    assert (config.num_layers, config.hidden_size, config.num_heads) == (40, 5120, 40)


def test_numbers() -> None:
    model = shape(
        "layers=8,hidden=512,heads=8,kv=2,intermediate=1024,vocabulary=1000,experts=8,top_k=2"
    )
    assert model.config.num_kv_heads == 2 and model.config.moe.experts == 8
    assert parameters(model).experts == 8 * 8 * 3 * 512 * 1024


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("llama-3.1-71b", "did you mean 'llama-3.1-70b'?"),
        ("gpt-7", "gpt"),
        ("layers=32,hidden=4096", "has no heads"),
        ("layers=32,hidden=4096,heads=33", "no multiple of heads=33"),
        ("layers=32,hidden=4096,heads=32,kv=5", "no multiple of kv=5"),
        ("layer=32", "did you mean 'layers'?"),
        ("layers=many,hidden=4096,heads=32", "no positive whole number"),
        ("layers=2,hidden=64,heads=2,top_k=2", "add experts=…"),
        ("layers=2,hidden=64,heads=2,experts=2,top_k=4", "top_k=4 is more than experts=2"),
        ("0B", "1M to 100T"),
        ("some/where/config.json", "cannot read some/where/config.json"),
    ],
)
def test_what_is_no_model(text: str, told: str) -> None:
    with pytest.raises(PlanError) as error:
        shape(text)
    assert told in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": None}, "`num_hidden_layers`"),
        ({"hidden_size": "wide"}, "`hidden_size`"),
        ({"num_attention_heads": 3}, "multiple of"),
        ({"model_type": "lama", "vocab_size": None}, "`vocab_size`; add it, or use a model_type"),
        (
            {"model_type": "mamba", "num_attention_heads": None},
            "'mamba' has no `num_attention_heads`",
        ),
        ({"model_type": 3}, "`model_type` of"),
        ({"model_type": "llama4"}, "no `num_local_experts`"),
    ],
)
def test_a_config_that_is_wrong_names_the_field(tmp_path: Path, change: dict, told: str) -> None:
    with pytest.raises(PlanError) as error:
        shape(write(tmp_path, {**LLAMA, **change}))
    assert told in str(error.value), str(error.value)


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("[1]", "{"):
        path.write_text(text)
        with pytest.raises(PlanError, match=r"config\.json"):
            shape(path)


def test_a_gpt2_config(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
              "n_positions": 1024}  # fmt: skip
    assert parameters(shape(write(tmp_path, config))).total == 124_439_808
    with pytest.raises(PlanError, match="`n_embd`"):
        shape(write(tmp_path, {**config, "n_embd": None}))


def test_a_model_with_several_parts(tmp_path: Path) -> None:
    """Kimi K2.5 keeps its language model in `text_config`."""
    from fivefold.plan.models.published import PUBLISHED

    outer = {"model_type": "kimi_k25", "text_config": {**PUBLISHED["kimi-k2"][0]}}
    assert shape(write(tmp_path, outer)).config == published("kimi-k2").config


def test_a_family_that_nobody_knows_is_read_as_a_llama(tmp_path: Path) -> None:
    model = shape(write(tmp_path, {**LLAMA, "model_type": "phi9", "rope_scaling": {"type": "odd"}}))
    assert model.config == shape(write(tmp_path, {**LLAMA, "rope_theta": 10_000.0})).config
    assert not model.runs and "'phi9' is unknown and read as Llama" in model.notes[0]
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
               "n_shared_experts": 2, "first_k_dense_replace": 1}  # fmt: skip
    model = shape(write(tmp_path, {**LLAMA, "model_type": "bailing", **experts}))
    moe = model.config.moe
    assert moe is not None and (moe.experts, moe.top_k, moe.expert_size) == (16, 4, 96)
    assert moe.shared_size == 192 and moe.sparse == (False, True, True, True)


def test_layers_for_multi_token_prediction_are_named(shared_data: Path) -> None:
    path = shared_data / "hf-configs/aiconfigurator/deepseek-ai--DeepSeek-V3_config.json"
    assert "multi-token prediction" in shape(path).notes[0] and shape(path).runs


def test_linear_attention_has_a_window_as_large_as_its_state() -> None:
    """64 heads of 128 x 128 are as much as keys and values of 2 heads of 256 for 1024 tokens."""
    config = published("qwen3.5-397b-a17b").config
    assert config.windows[:4] == (1024, 1024, 1024, None)


def test_gpt_oss_looks_back_a_window_on_every_second_layer() -> None:
    config = published("gpt-oss-20b").config
    assert config.windows[:3] == (128, None, 128) and config.qkv_bias


def test_naming_a_model_needs_no_torch() -> None:
    code = (
        "import sys; from fivefold.plan.models import shape, parameters; "
        "from fivefold.plan.hardware.parse import cluster; cluster('8x8xH100'); "
        "parameters(shape('deepseek-v3')); print('torch' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "False"


def test_every_config_that_is_at_hand_is_read(shared_data: Path) -> None:
    paths = sorted((shared_data / "hf-configs").glob("*/*.json"))
    assert len(paths) > 30
    for path in paths:
        assert parameters(shape(path)).total > 1e8, path.name


def test_the_page_names_every_family_that_is_approximated() -> None:
    from fivefold.plan.models.near import NEAR

    page = (Path(__file__).resolve().parents[4] / "docs" / "plan-models.md").read_text("utf-8")
    for kind in NEAR:
        assert f"`{kind.removesuffix('_text')}`" in page, kind
    for part in ("6,738,415,616", "2,147,483,648", "4,328,521,728", "266,240"):
        assert part in page
