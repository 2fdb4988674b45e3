"""A model as numbers: what a plan needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.model.config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """A decoder of ours, or one that differs by the few things that GPT-2 and GPT-3 have.

    gated: the feed-forward has a gate beside `up` (SwiGLU); else two matrices (GELU).
    norm_bias: LayerNorm with a bias instead of RMSNorm.
    learned_positions: rows of a table of positions, beside the embedding; 0: rotary.
    notes: what of the model is only approximated, a phrase each.
    runs: whether fivefold itself has this decoder; else the shape is good for planning alone.
    """

    name: str
    config: ModelConfig
    gated: bool = True
    norm_bias: bool = False
    learned_positions: int = 0
    source: str = ""
    notes: tuple[str, ...] = ()
    runs: bool = True

    def __hash__(self) -> int:
        """Of a few fields: shapes are keys of many caches, and those of all layers take long."""
        config = self.config
        return hash((self.name, config.hidden_size, config.num_layers, config.vocab_size))
