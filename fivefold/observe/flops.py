"""Floating-point operations of a decoder, counted from its shape.

A multiply-add is two operations. Counted are matrix products alone (the convention of PaLM,
Chowdhery et al. 2022, appendix B, and of Megatron, Narayanan et al. 2021), for one token:

    matrices   2 N forward, N the elements of every weight matrix a token is multiplied by:
               L (2 D H E + 2 D K E + 3 D F) + D V. The head counts, tied or not; looking a
               token up in the embedding is no product and does not.
               Of experts those count that a token is routed to; latent attention (MLA) counts
               its own matrices.
    attention  4 H E A forward in each layer: query . key and weights . value, over the A keys
               a token attends to on average; 2 H (E + value dim) A where the dims differ.
    training   three times forward: backward computes a gradient for either operand of each
               product. So 6 N + 12 L H E A.

Causal attention needs half of the square: A = (S + 1) / 2, with the diagonal, where PaLM's
formula has S; a window W limits it to min(position, W). Documents packed into one sequence are
counted as if they were one: where attention stops at their borders, fewer operations are needed.

L layers, D hidden, H heads, K kv heads, E head_dim, F intermediate, V vocabulary, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.errors import ConfigError

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class DecoderShape:
    """The numbers that the operations of a decoder depend on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()  # one a layer; empty: every layer attends to all
    value_dim: int | None = None  # of a head; None: head_dim
    # Elements of the matrices that a token meets, one a layer, where they are not those of the formula
    # above: experts it is routed to, latent attention.
    elements: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.windows)} attention windows for {self.num_layers} layers",
                "give one window (or none) for each layer",
            )

    def layer_parameters(self, layer: int) -> int:
        """Elements of one layer's weight matrices, of experts those that a token meets."""
        if self.elements:
            return self.elements[layer]
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.hidden_size * self.vocab_size

    @property
    def matrix_parameters(self) -> int:
        """N: elements of every matrix that a token is multiplied by."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        return layers + self.head_parameters

    @property
    def attention_operations(self) -> int:
        """Of one token and one key it attends to: query . key and weight times value."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return 2 * self.num_heads * (self.head_dim + value_dim)


def attended_keys(sequence_length: int, window: int | None = None) -> float:
    """Keys that a token of a causal sequence attends to, itself included, on average: A."""
    reach = sequence_length if window is None else min(window, sequence_length)
    # The first `reach` tokens see 1, 2, …, reach keys, each later one sees `reach`.
    growing = reach * (reach + 1) // 2
    return (growing + (sequence_length - reach) * reach) / sequence_length


def forward_flops_per_token(shape: DecoderShape, sequence_length: int) -> float:
    """Operations of a forward pass over whole sequences, logits for each token, per token."""
    return 2 * shape.matrix_parameters + _attention(shape, sequence_length)


def training_flops_per_token(shape: DecoderShape, sequence_length: int) -> float:
    """Operations that one training step needs per token. With it, rate x this / peak is the MFU."""
    return 3 * forward_flops_per_token(shape, sequence_length)


def hardware_flops_per_token(
    shape: DecoderShape, sequence_length: int, recompute: Recompute, every: int = 1
) -> float:
    """Operations that the hardware does per token, recomputation included: HFU in place of MFU.

    `full` runs the forward pass of every `every`-th layer again (its last product too, which a
    clever scheme could leave out). `selective` keeps the result of every product, so that what it
    computes again is not counted here. The head is never recomputed.
    """
    needed = training_flops_per_token(shape, sequence_length)
    if recompute != "full":
        return needed
    layers = range(0, shape.num_layers, every)
    again = sum(_layer_attention(shape, sequence_length, layer) for layer in layers)
    return needed + again + 2 * sum(shape.layer_parameters(layer) for layer in layers)


def prefill_flops(shape: DecoderShape, prompt_length: int) -> float:
    """Operations to read a prompt of `prompt_length` tokens, logits for the last one alone."""
    matrices = shape.matrix_parameters - shape.head_parameters
    layers = 2 * matrices + _attention(shape, prompt_length)
    return prompt_length * layers + 2 * shape.head_parameters


def decode_flops(shape: DecoderShape, context_length: int) -> float:
    """Operations to make one token after `context_length - 1` cached ones."""
    attention = sum(
        shape.attention_operations * min(context_length, window or context_length)
        for window in _windows(shape)
    )
    return 2 * shape.matrix_parameters + attention


def _attention(shape: DecoderShape, sequence_length: int) -> float:
    return sum(_layer_attention(shape, sequence_length, i) for i in range(shape.num_layers))


def _layer_attention(shape: DecoderShape, sequence_length: int, layer: int) -> float:
    keys = attended_keys(sequence_length, _windows(shape)[layer])
    return shape.attention_operations * keys


def _windows(shape: DecoderShape) -> tuple[int | None, ...]:
    return shape.windows or (None,) * shape.num_layers
