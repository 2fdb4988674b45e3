"""Random small mixtures of experts, in transformers and with the same weights in ours."""

from __future__ import annotations

import json
from typing import Any

import torch
from family_cases import CONTEXT, VOCABULARY, rope_settings, theirs_of
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config, weight_names

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]


@st.composite
def configs(draw: st.DrawFn, family: str, narrowest: int = 1) -> dict[str, Any]:
    """Keys of a config.json of `family`, windows from `narrowest` on."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    layers = draw(st.integers(1, 3))
    hf: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        # Now and then multiples of 4, which torch's grouped product asks for.
        "hidden_size": heads * draw(st.sampled_from([4, 6, 8, 12])),
        "intermediate_size": draw(st.sampled_from([7, 8, 20, 32])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "initializer_range": 0.25,  # wide: answers wander instead of repeating
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    hf["num_key_value_heads"] = heads if family.startswith("deepseek") else kv_heads
    if family in ("mixtral", "qwen3_moe"):
        hf["head_dim"] = 2 * draw(st.integers(2, 9))
    theta = draw(st.sampled_from([100.0, 10_000.0, 1_000_000.0]))
    hf["rope_parameters"] = {"rope_theta": theta, **draw(rope_settings())}
    return hf | draw(OWN[family](layers, draw(st.integers(narrowest, 9))))


@st.composite
def _mixtral(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    experts = draw(st.integers(1, 7))
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "sliding_window": draw(st.sampled_from([None, window])),
    }


@st.composite
def _qwen3_moe(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    experts = draw(st.integers(1, 9))
    return {
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.sampled_from([3, 8, 12])),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.sampled_from([1, 1, 2])),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=1)),
        "attention_bias": draw(st.booleans()),
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": window,
    }


@st.composite
def _deepseek(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    chosen = draw(st.integers(1, groups))
    return {
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "q_lora_rank": draw(st.sampled_from([None, 6, 8])),
        "kv_lora_rank": draw(st.sampled_from([4, 10])),
        "qk_nope_head_dim": draw(st.sampled_from([2, 4, 10])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 6, 8])),
        "v_head_dim": draw(st.sampled_from([3, 8, 20])),
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": draw(st.integers(1, chosen * each)),
        "moe_intermediate_size": draw(st.sampled_from([3, 8, 12])),
        "n_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def _deepseek_v2(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    hf = draw(_deepseek(layers))
    method = draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    return hf | {"topk_method": method, "mlp_bias": draw(st.booleans()), "norm_topk_prob": False}


@st.composite
def _deepseek_v3(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    hf = draw(_deepseek(layers))
    normalise, interleave = draw(st.booleans()), draw(st.booleans())
    # Their V2 turns pairs as complex numbers, for which these dims must be even.
    still = {"qk_nope_head_dim": draw(st.sampled_from([3, 4, 10]))}
    return hf | still | {"norm_topk_prob": normalise, "rope_interleave": interleave}


OWN = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


@st.composite
def long_contexts(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """DeepSeek's own scaling, with its two mscales or one of them."""
    hf = draw(configs(family))
    scales = {
        "mscale": draw(st.sampled_from([None, 0.707, 1.0])),
        "mscale_all_dim": draw(st.sampled_from([None, 0, 0.707, 1.0])),
    }
    hf["rope_parameters"] = {
        "rope_theta": 10_000.0,
        "rope_type": "yarn",
        "factor": draw(st.sampled_from([1.0, 4.0, 40.0])),
        "original_max_position_embeddings": 16,
        **{k: v for k, v in scales.items() if v is not None},
    }
    return hf


def randomised(hf: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Their model; the biases of its routers too are random, which start at zero."""
    theirs = theirs_of(hf, seed)
    # Their grouped product takes only sizes that are multiples of 4.
    theirs.config._experts_implementation = "eager"
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    return theirs


def ours_of(theirs: PreTrainedModel, config: ModelConfig) -> Decoder:
    """The same weights in our decoder."""
    state = theirs.state_dict()
    ours = Decoder(config, device="meta").to_empty(device="cpu")
    ours.load_state_dict(_values(state, config))
    return ours


def _values(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """By our names. transformers holds experts stacked too, gate and up in one tensor."""
    left = set(state)
    values = {}
    for ours, stored in weight_names(config).items():
        theirs = stored.replace("block_sparse_moe", "mlp")
        leaf = ours.rpartition(".")[2]
        if ".experts." in ours:
            stem = theirs.partition(".experts.")[0] + ".experts."
            theirs = stem + ("down_proj" if leaf == "down" else "gate_up_proj")
        value = state[theirs]
        if ".experts." in ours and leaf != "down":
            value = value.chunk(2, dim=1)[leaf == "up"]
        values[ours] = value
        left.discard(theirs)
    # Nothing of theirs is left out: a tied head is the embedding again.
    assert left == ({"lm_head.weight"} if config.tie_embeddings else set())
    return values


def pair(hf: dict[str, Any], seed: int = 0) -> tuple[PreTrainedModel, Decoder]:
    """(theirs, ours), ours configured by the config.json that theirs would be saved with."""
    theirs = randomised(hf, seed)
    return theirs, ours_of(theirs, parse_config(json.loads(theirs.config.to_json_string())))
