"""Decoders with experts: names, devices, formats, recomputation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import logits, positions, tokens
from moe_model_cases import FAMILIES, config, decoder, hf_config, mixtures
from torch.utils.checkpoint import checkpoint

from fivefold.core.errors import WeightsError
from fivefold.model.attention_backend import CausalAttention, PackedAttention
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.config import RopeConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import export_config, parse_config, stored_names, weight_names

# Parameters as the models' own cards and papers count them; DeepSeek's without the layer for
# predicting a second token.
PUBLISHED = {
    "mistralai--Mixtral-8x7B-v0.1_config.json": 46_702_792_704,
    "mistralai--Mixtral-8x22B-v0.1_config.json": 140_620_634_112,
    "Qwen--Qwen3-30B-A3B_config.json": 30_532_122_624,
    "Qwen--Qwen3-235B-A22B_config.json": 235_093_634_560,
    "deepseek-ai--DeepSeek-V3_config.json": 671_026_404_352,
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def test_published_configs_have_their_published_size(shared_data: Path) -> None:
    for name, count in PUBLISHED.items():
        hf = json.loads((shared_data / "hf-configs/aiconfigurator" / name).read_text())
        model = Decoder(parse_config(hf), device="meta")
        assert sum(p.numel() for p in model.parameters()) == count, name
        assert set(weight_names(model.config)) == set(model.state_dict())


def test_deepseek_v3_is_read(shared_data: Path) -> None:
    path = shared_data / "hf-configs/ome/deepseek_v3.json"
    parsed = parse_config(json.loads(path.read_text()))
    assert parsed.moe is not None and parsed.mla is not None
    assert parsed.moe.sparse == (False,) * 3 + (True,) * 58
    assert (parsed.head_dim, parsed.rotary_dim, parsed.value_dim) == (192, 64, 128)
    assert parsed.scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert parsed.ropes[0] == RopeConfig(
        kind="yarn", factor=40.0, original_positions=4096, attention_factor=1.0, mscale_all_dim=1.0
    )


@each_family
def test_every_tensor_has_its_names_in_hugging_face_files(family: str) -> None:
    model = decoder(family)
    names = weight_names(model.config)
    assert set(names) == set(model.state_dict())
    stored = [s for name in names.values() for s in stored_names(name, model.config)]
    assert len(set(stored)) == len(stored)
    assert not any("*" in name for name in stored)


def test_names_are_those_of_the_plans() -> None:
    names = list(decoder("deepseek_v3").state_dict())
    assert [n.removeprefix("layers.1.") for n in names if n.startswith("layers.1.")] == [
        "attention_norm.weight",
        "attention.query_down.weight",
        "attention.query_norm.weight",
        "attention.query_up.weight",
        "attention.key_value_down.weight",
        "attention.key_value_norm.weight",
        "attention.key_value_up.weight",
        "attention.output.weight",
        "feed_forward_norm.weight",
        "feed_forward.router.weight",
        "feed_forward.router.bias",
        "feed_forward.experts.gate",
        "feed_forward.experts.up",
        "feed_forward.experts.down",
        "feed_forward.shared.gate.weight",
        "feed_forward.shared.up.weight",
        "feed_forward.shared.down.weight",
    ]
    assert "layers.0.feed_forward.gate.weight" in names
    assert "layers.0.attention.query.weight" in decoder("deepseek_v2").state_dict()


@each_family
def test_on_the_meta_device_nothing_is_allocated(family: str) -> None:
    model = Decoder(config(family), device="meta", dtype=torch.bfloat16)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} <= {torch.float32}


@each_family
def test_initialize_gives_values_to_all(family: str) -> None:
    model = Decoder(config(family), device="meta").to_empty(device="cpu")
    model.initialize(0)
    again = Decoder(config(family))
    again.initialize(0)
    found, expected = model.state_dict(), again.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(buffer.any() for buffer in model.buffers())


@each_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_runs_and_differentiates_in_every_format(family: str, dtype: torch.dtype) -> None:
    model = decoder(family, dtype=dtype)
    hidden = model(tokens(2, 12), positions(2, 12), CausalAttention())
    assert hidden.dtype == dtype
    model.logits(hidden).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert {b.dtype for b in model.buffers()} <= {torch.float32, torch.float64}


def test_the_bias_keeps_its_bits_in_a_narrow_model() -> None:
    model = decoder("deepseek_v3")
    before = [m.router.bias.clone() for m in mixtures(model)]  # type: ignore[union-attr]
    after = [m.router.bias for m in mixtures(model.bfloat16())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))  # type: ignore[arg-type]


@each_family
def test_caches_and_packed_rows_give_what_whole_rows_give(family: str) -> None:
    model = decoder(family, dtype=torch.float64)
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = logits(model, ids)
        cache = KVCache(model.config, 2, 12, dtype=torch.float64)
        pieces = []
        for part in ids.split((5, 1, 6), dim=1):
            count = part.shape[1]
            hidden = model(part, cache.positions(count), CachedAttention(cache))
            cache.advance([count] * 2)
            pieces.append(model.logits(hidden))
        documents = torch.tensor([[0] * 12 + [1] * 12])
        places = torch.arange(12).repeat(2)[None]
        packed = model.logits(model(ids.view(1, 24), places, PackedAttention(documents)))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed.view_as(whole), whole, rtol=1e-10, atol=1e-10)


@each_family
def test_blocks_may_be_recomputed_in_backward(family: str) -> None:
    model = decoder(family)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits(model, tokens(2, 9)).square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    counted = [m.load.total(torch.device("cpu")) for m in mixtures(model)]
    for block in model.layers:
        plain = block.forward
        block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    for layer in mixtures(model):
        layer.load.reset()
    found = gradients()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = [m.load.total(torch.device("cpu")) for m in mixtures(model)]
    assert all(torch.equal(a, b) for a, b in zip(again, counted, strict=True))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": None}, "has no `num_local_experts`"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is more than the 5 experts"),
    ("qwen3_moe", {"num_experts": None}, "has no `num_experts`"),
    ("qwen3_moe", {"mlp_only_layers": "1"}, "`mlp_only_layers` of the model's config is '1'"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "`moe_intermediate_size` of the model's"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' of deepseek_v2"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True of deepseek_v2"),
    ("deepseek_v2", {"kv_lora_rank": None}, "has no `kv_lora_rank`"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not covered"),
    ("deepseek_v2", {"qk_rope_head_dim": 5}, "head_dim=5 is odd"),
    ("deepseek_v3", {"n_group": 3}, "8 experts do not divide into 3 groups"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group=5 is more than the 4 groups"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "leave 1 in each"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "`first_k_dense_replace` of the model's"),
    (
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x"}},
        "`mscale` of the model's config is 'x'",
    ),
]


@pytest.mark.parametrize(("family", "changes", "words"), WRONG, ids=[w[2] for w in WRONG])
def test_a_wrong_config_is_refused_in_one_line(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        parse_config(hf_config(family, **changes))
    assert words in str(caught.value)
    assert caught.value.mend
    assert "\n" not in str(caught.value)


@each_family
def test_export_is_read_back_equal(family: str) -> None:
    for changes in (
        {},
        {"tie_word_embeddings": True, "num_hidden_layers": 1},
        {"attention_bias": family != "mixtral"},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}}
        if family.startswith("deepseek")
        else {"sliding_window": 5, "use_sliding_window": True},
    ):
        given = config(family, **changes)
        assert parse_config(json.loads(json.dumps(export_config(given)))) == given
