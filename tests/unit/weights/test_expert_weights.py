"""Experts in Hugging Face folders: formats, layers that are passed over, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.weights.open import load_decoder
from fivefold.weights.save import save_huggingface

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder = Decoder(parse_config(CONFIG))
    decoder.initialize(0)
    for buffer in decoder.buffers():
        buffer.copy_(torch.tensor([0.001, 0.5, 1.003, -0.2507]))
    save_huggingface(tmp_path, decoder, decoder.config, dtype=torch.bfloat16)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_bias_is_fp32_in_a_bf16_folder_and_when_it_is_read(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert stored[BIAS].dtype == torch.float32
    assert {v.dtype for n, v in stored.items() if n != BIAS} == {torch.bfloat16}
    decoder = load_decoder(folder, dtype=torch.bfloat16)
    ((name, bias),) = decoder.named_buffers()
    assert name == "layers.1.feed_forward.router.bias"
    assert torch.equal(bias, torch.tensor([0.001, 0.5, 1.003, -0.2507]))
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}


def test_experts_are_stacked_in_the_order_of_their_numbers(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    experts = load_decoder(folder).layers[1].feed_forward.experts
    for expert in range(4):
        for leaf in ("gate", "up", "down"):
            value = getattr(experts, leaf)[expert]
            assert torch.equal(value, stored[EXPERT.format(expert, leaf)].float())


def test_layers_that_predict_more_tokens_are_passed_over(folder: Path) -> None:
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    edit(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(WeightsError, match=r"does not have: model\.layers\.2\.eh_proj\.weight"):
        load_decoder(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    load_decoder(folder)


def test_a_missing_expert_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(EXPERT.format(2, "up")))
    with pytest.raises(WeightsError, match=r"lacks 1 of \d+ tensors: layers\.1\.feed_forward"):
        load_decoder(folder)


def test_an_expert_of_another_shape_is_named(folder: Path) -> None:
    name = EXPERT.format(3, "down")
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16, 9)}))
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj\.weight in .* \[16, 9\]"):
        load_decoder(folder)


def test_more_experts_than_the_config_says_are_strangers(folder: Path) -> None:
    name = EXPERT.format(4, "down")
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16, 8)}))
    with pytest.raises(WeightsError, match=r"does not have: .*experts\.4\.down_proj"):
        load_decoder(folder)
