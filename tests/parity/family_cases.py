"""Random small models of every family, in transformers and with the same weights in ours."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fivefold.model.attention_backend import CausalAttention
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config, weight_names

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
VOCABULARY = 97
CONTEXT = 32  # prompts and answers go beyond it, so that dynamic scaling sets in
SCALINGS = ["default", "linear", "dynamic", "llama3", "yarn"]


@st.composite
def rope_settings(draw: st.DrawFn) -> dict[str, Any]:
    """`rope_parameters` of any kind, without the base."""
    kind = draw(st.sampled_from(SCALINGS))
    settings: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        settings["factor"] = draw(st.sampled_from([1.5, 4.0, 8.0]))
    if kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = draw(st.sampled_from([8, 16, CONTEXT]))
    if kind == "llama3":
        settings["low_freq_factor"] = draw(st.sampled_from([0.5, 1.0]))
        settings["high_freq_factor"] = draw(st.sampled_from([2.0, 4.0]))
    if kind == "yarn":
        optional = {
            "beta_fast": draw(st.sampled_from([None, 16.0])),
            "beta_slow": draw(st.sampled_from([None, 2.0])),
            "attention_factor": draw(st.sampled_from([None, 0.8, 1.2])),
        }
        settings |= {k: v for k, v in optional.items() if v is not None}
    return settings


@st.composite
def configs(draw: st.DrawFn, family: str, narrowest: int = 1) -> dict[str, Any]:
    """Keys of a config.json of `family`, windows from `narrowest` on."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    layers = draw(st.integers(1, 4))
    hf: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": heads * 2 * draw(st.integers(2, 6)),
        "intermediate_size": draw(st.integers(8, 48)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(st.booleans()),
        "initializer_range": 0.25,  # wide: answers wander instead of repeating
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if family != "qwen2" and draw(st.booleans()):
        hf["head_dim"] = 2 * draw(st.integers(2, 9))
    elif family in ("qwen3", "gemma3_text"):
        hf["head_dim"] = hf["hidden_size"] // heads
    window = draw(st.integers(narrowest, 9))
    return hf | draw(OWN[family](layers, window))


def _theta() -> st.SearchStrategy[float]:
    return st.sampled_from([100.0, 10_000.0, 1_000_000.0])


@st.composite
def _rope(draw: st.DrawFn) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": draw(_theta()), **draw(rope_settings())}}


@st.composite
def _llama(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    biases = {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    act = draw(st.sampled_from(["silu", "gelu_pytorch_tanh"]))
    return draw(_rope()) | biases | {"hidden_act": act}


@st.composite
def _mistral(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    return draw(_rope()) | {"sliding_window": draw(st.sampled_from([window, window, None]))}


@st.composite
def _qwen2(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    windows: dict[str, Any] = {
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": window,
        "max_window_layers": draw(st.integers(0, layers)),
    }
    if windows["use_sliding_window"] and draw(st.booleans()):
        windows["layer_types"] = draw(_layer_types(layers))
    return draw(_rope()) | windows


@st.composite
def _qwen3(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    return draw(_qwen2(layers, window)) | {"attention_bias": draw(st.booleans())}


@st.composite
def _gemma3(draw: st.DrawFn, layers: int, window: int) -> dict[str, Any]:
    hf: dict[str, Any] = {
        "sliding_window": window,
        "query_pre_attn_scalar": draw(st.sampled_from([4, 10, 24])),
        "attention_bias": draw(st.booleans()),
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0, 30.0])),
        "attn_logit_softcapping": draw(st.sampled_from([None, 50.0])),
    }
    if draw(st.booleans()):
        hf["sliding_window_pattern"] = draw(st.integers(1, 4))
    else:
        hf["layer_types"] = draw(_layer_types(layers))
    whole, local = draw(rope_settings()), draw(_theta())
    hf["rope_parameters"] = {
        "full_attention": {"rope_theta": draw(_theta()), **whole},
        "sliding_attention": {"rope_theta": local, "rope_type": "default"},
    }
    return hf


def _layer_types(layers: int) -> st.SearchStrategy[list[str]]:
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    return st.lists(kinds, min_size=layers, max_size=layers)


OWN = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}


def transformers_config(hf: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**json.loads(json.dumps(hf)))


def theirs_of(hf: dict[str, Any], seed: int) -> PreTrainedModel:
    """transformers' model with random weights; norms and biases too, which start constant."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        transformers_config(hf), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def ours_of(theirs: PreTrainedModel, config: ModelConfig) -> Decoder:
    """The same weights in our decoder, by `weight_names`."""
    state = theirs.state_dict()
    ours = Decoder(config, device="meta").to_empty(device="cpu")
    names = weight_names(config)
    ours.load_state_dict({name: state[foreign] for name, foreign in names.items()})
    # Nothing of theirs is left out: a tied head is the embedding again.
    left = set(state) - set(names.values())
    assert left == ({"lm_head.weight"} if config.tie_embeddings else set())
    return ours


def pair(hf: dict[str, Any], seed: int = 0) -> tuple[PreTrainedModel, Decoder]:
    """(theirs, ours), ours configured by the config.json that theirs would be saved with."""
    theirs = theirs_of(hf, seed)
    return theirs, ours_of(theirs, parse_config(json.loads(theirs.config.to_json_string())))


def ids(batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def logits(ours: Decoder, tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    return ours.logits(ours(tokens, places, CausalAttention()))


@torch.no_grad()
def greedy(ours: Decoder, prompt: Tensor, count: int) -> Tensor:
    """The next `count` most likely tokens of each row, through a cache."""
    cache = KVCache(
        ours.config, prompt.shape[0], prompt.shape[1] + count, dtype=ours.norm.weight.dtype
    )
    step, answer = prompt, []
    for _ in range(count):
        hidden = ours(step, cache.positions(step.shape[1]), CachedAttention(cache))
        cache.advance([step.shape[1]] * prompt.shape[0])
        step = ours.logits(hidden[:, -1:]).argmax(-1)
        answer.append(step)
    return torch.cat(answer, dim=1)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
