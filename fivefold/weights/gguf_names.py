"""Tensors of a GGUF file by our names, and what llama.cpp's converter did to their values."""

from __future__ import annotations

from torch import Tensor

from fivefold.model.config import ModelConfig
from fivefold.model.families import weight_names

_OUTSIDE = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
_BLOCK = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward_post_norm": "post_ffw_norm",
}
# Tables that are computed here.
PASSED_OVER = {"rope_freqs.weight"}


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """Our name of every parameter to its name in a GGUF file."""
    names = {}
    for name in weight_names(config):
        if name in _OUTSIDE:
            names[name] = _OUTSIDE[name]
        else:
            _, layer, rest = name.split(".", 2)
            module, _, leaf = rest.rpartition(".")
            names[name] = f"blk.{layer}.{_BLOCK[module]}.{leaf}"
    return names


def in_our_order(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Rows of Llama's queries and keys where Hugging Face has them; the rest is as it was."""
    if config.family in ("llama", "mistral"):
        if ".attention.query." in name:
            return halves_from_pairs(value, config.num_heads)
        if ".attention.key." in name:
            return halves_from_pairs(value, config.num_kv_heads)
    return value


def is_offset(name: str, config: ModelConfig) -> bool:
    """True for a norm that is stored with `norm_offset` added to it, as Gemma's are."""
    return bool(config.norm_offset) and name.endswith("norm.weight")


def halves_from_pairs(value: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] whose rotary pairs are neighbours, to pairs half a head apart.

    The first is Meta's order, which llama.cpp and llama2.c keep, the second Hugging Face's.
    """
    pairs = value.view(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
