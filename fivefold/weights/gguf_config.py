"""The configuration of a model from the metadata of its GGUF file, in config.json's words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.core.errors import WeightsError, nearest
from fivefold.model.config import ModelConfig
from fivefold.model.families import parse_config
from fivefold.weights.gguf_header import Header

# general.architecture: model_type of config.json.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
# Llama 3.1 to 3.3, the only models that are published with such a table (see `_table_scaling`).
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA3_27B_LAYERS = 62


def config_from_gguf(path: object, header: Header, rope_table: Tensor | None) -> ModelConfig:
    """The decoder that a GGUF file describes; `rope_table` is its tensor `rope_freqs.weight`.

    Raises WeightsError for an architecture that is not covered or metadata that is missing.
    """
    metadata = header.metadata
    if metadata.get("split.count", 1) > 1:
        raise WeightsError(
            f"{path} is one of {metadata['split.count']} parts of a model",
            "join them first: llama-gguf-split --merge FIRST_PART WHOLE",
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise WeightsError(f"{path} has no general.architecture", "convert the model again")
    if architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{path} holds the architecture {architecture!r}, which is not covered",
            nearest(architecture, ARCHITECTURES),
        )
    return parse_config(_Reader(path, header, architecture).config(rope_table))


class _Reader:
    """Metadata below the architecture's own prefix."""

    def __init__(self, path: object, header: Header, architecture: str) -> None:
        self._path = path
        self._metadata = header.metadata
        self._tensors = header.tensors
        self._architecture = architecture

    def config(self, rope_table: Tensor | None) -> dict[str, Any]:
        """A config.json."""
        if self.get("expert_count", 0):
            raise WeightsError(
                f"{self._path} has experts, which are not covered", "use a dense model"
            )
        heads = self.need("attention.head_count")
        hidden = self.need("embedding_length")
        head_dim = self.get("attention.key_length", hidden // heads)
        rotary = self.get("rope.dimension_count", head_dim)
        if rotary != head_dim or self.get("attention.value_length", head_dim) != head_dim:
            raise WeightsError(
                f"{self._path} turns {rotary} of {head_dim} dims of a head, or has values of "
                "another size, which is not covered",
                "use another model",
            )
        config = {
            "model_type": ARCHITECTURES[self._architecture],
            "hidden_size": hidden,
            "intermediate_size": self.need("feed_forward_length"),
            "num_hidden_layers": self.need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.need("context_length"),
            "rms_norm_eps": _decimal(self.need("attention.layer_norm_rms_epsilon")),
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_theta": _decimal(self.get("rope.freq_base", 10_000.0)),
            "rope_scaling": self._scaling(rope_table, head_dim),
            **self._token_ids(),
        }
        return config | self._family_fields(config)

    def need(self, key: str) -> Any:
        """A value the file must have."""
        value = self.get(key, None)
        if value is None:
            raise WeightsError(
                f"{self._path} lacks the metadata {self._architecture}.{key}",
                "convert the model again",
            )
        return value

    def get(self, key: str, default: Any) -> Any:
        """A value, or what holds when the file does not say."""
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list):  # one a layer
            if len(set(value)) > 1:
                raise WeightsError(
                    f"{self._path} varies {self._architecture}.{key} by layer, which is not covered",
                    "use another model",
                )
            value = value[0] if value else default
        return value

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise WeightsError(
                f"{self._path} lacks the tensor token_embd.weight", "convert the model again"
            )
        return self._tensors["token_embd.weight"].shape[0]

    def _token_ids(self) -> dict[str, Any]:
        def token(role: str) -> int | None:
            return self._metadata.get(f"tokenizer.ggml.{role}_token_id")

        ends = [token(role) for role in ("eos", "eot", "eom")]
        return {
            "bos_token_id": token("bos"),
            "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)) or None,
            "pad_token_id": token("padding"),
        }

    def _scaling(self, rope_table: Tensor | None, head_dim: int) -> dict[str, Any] | None:
        if rope_table is not None:
            return self._table_scaling(rope_table, head_dim)
        kind = self.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self.need("rope.scaling.factor")}
        original = self.get("rope.scaling.original_context_length", None)
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _table_scaling(self, table: Tensor, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling, which files hold only as a factor for each frequency.

        The rule is recovered by applying it: what it gives must be the table.
        """
        scaling = _LLAMA3 | {"factor": float(table.max())}
        theta = self.get("rope.freq_base", 10_000.0)
        if not torch.allclose(table, llama3_factors(theta, head_dim, scaling), rtol=1e-4):
            raise WeightsError(
                f"{self._path} has a rope_freqs.weight that is not Llama 3's, which is not covered",
                "use the safetensors files of the model",
            )
        return scaling

    def _family_fields(self, config: dict[str, Any]) -> dict[str, Any]:
        window = self.get("attention.sliding_window", None)
        if self._architecture == "gemma3":
            # Only the 27B model scales by something else than its head_dim, and no file says so:
            # llama.cpp, too, knows it by its number of layers.
            odd = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
            per_head = config["hidden_size"] // config["num_attention_heads"]
            return {
                "sliding_window": self.need("attention.sliding_window"),
                "query_pre_attn_scalar": per_head if odd else config["head_dim"],
                "rope_local_base_freq": self.get("rope.freq_base_swa", 10_000.0),
                "final_logit_softcapping": self.get("final_logit_softcapping", None),
            }
        if self._architecture == "llama" and window:
            # Mistral's files say llama; a window is what sets the family apart.
            return {"model_type": "mistral", "sliding_window": window}
        return {
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "sliding_window": window,
        }


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> Tensor:
    """What Llama 3's scaling divides each frequency by [head_dim / 2], in fp32."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).float()


def _decimal(value: float) -> float:
    """The short decimal that was rounded to fp32 in the file: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))
