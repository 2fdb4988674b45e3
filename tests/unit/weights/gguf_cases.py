"""GGUF files written as llama.cpp's converter writes them, from weights in Hugging Face's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str, gemma: bool) -> str:
    module, leaf = name.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    if part == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if gemma else 'ffn_norm'}.{leaf}"
    return f"blk.{layer}.{BLOCK[part]}.{leaf}"


def permuted(value: Tensor, heads: int) -> Tensor:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    rows = value.shape[0] // heads // 2
    return value.reshape(heads, 2, rows, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    type: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> Path:
    """A file with the weights `state` (Hugging Face names) of a config.json."""
    architecture = architecture or config["model_type"].removesuffix("_text")
    gemma = architecture == "gemma3"
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (metadata or {}).items():
        add(writer, key.replace("ARCH", architecture), value)
    for name, value in state.items():
        if architecture in ("llama", "mistral") and ".q_proj." in name:
            value = permuted(value, config["num_attention_heads"])
        if architecture in ("llama", "mistral") and ".k_proj." in name:
            value = permuted(value, config["num_key_value_heads"])
        if gemma and name.endswith("norm.weight"):
            value = value + 1
        add_tensor(writer, gguf_name(name, gemma), value.detach().float().numpy(), type)
    for name, value in (tables or {}).items():
        writer.add_tensor(name, value.numpy())
    finish(writer)
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(
    writer: GGUFWriter, name: str, value: np.ndarray, type: GGMLQuantizationType
) -> None:
    """Matrices in `type`, the rest in F32, as the converter does."""
    if value.ndim < 2:
        type = GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(value, type), raw_dtype=type)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_metadata(
    model: str,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    pre: str = "",
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    **more: Any,
) -> dict[str, Any]:
    """What a file says of its tokenizer."""
    found: dict[str, Any] = {"model": model, "tokens": list(tokens), "token_type": list(kinds)}
    found |= {"pre": pre} if pre else {}
    found |= {"merges": list(merges)} if merges else {}
    found |= {"scores": list(scores)} if scores else {}
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def random_state(model: torch.nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Values of every size for a transformers model, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        state[name] = noise * 0.05 if value.ndim > 1 else 1 + noise * 0.1
    return state
