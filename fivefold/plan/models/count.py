"""Parameters by component, from the shape alone: exact for every decoder of ours, and for GPT."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fivefold.plan.shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Elements of each component. `active`: those a token meets; of experts, the ones it goes to.

    feed_forward: dense ones. shared_experts: what all tokens pass beside the routed experts.
    norms: all of them, those of heads and latents included. head: 0 where it is the embedding.
    What a router's bias holds is no parameter (no gradient reaches it) and not counted.
    """

    embedding: int = 0
    positions: int = 0
    attention: int = 0
    feed_forward: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    head: int = 0
    active_experts: int = 0

    @property
    def total(self) -> int:
        """All elements."""
        return sum(self.by_component().values())

    @property
    def active(self) -> int:
        """Elements that a token meets: all but the experts that it is not routed to."""
        return self.total - self.experts + self.active_experts

    def by_component(self) -> dict[str, int]:
        """Component to elements, in the order of the model; `active_experts` is part of `experts`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "active_experts"}

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


def parameters(shape: ModelShape) -> Parameters:
    """Of the whole model."""
    total = outer_parameters(shape)
    for layer in range(shape.config.num_layers):
        total += layer_parameters(shape, layer)
    return total


def outer_parameters(shape: ModelShape) -> Parameters:
    """Of what is no layer: embedding, positions, the last norm and the head."""
    config = shape.config
    table = config.vocab_size * config.hidden_size
    return Parameters(
        embedding=table,
        positions=shape.learned_positions * config.hidden_size,
        norms=_norm(shape),
        head=0 if config.tie_embeddings else table,
    )


def layer_parameters(shape: ModelShape, layer: int) -> Parameters:
    """Of one block."""
    config = shape.config
    norms = (4 if config.post_norms else 2) * _norm(shape) + _inner_norms(shape)
    if not config.is_sparse(layer):
        dense = _feed_forward(shape, config.intermediate_size)
        return Parameters(attention=_attention(shape), feed_forward=dense, norms=norms)
    moe = config.moe
    assert moe is not None, "sparse layers have experts"
    one = (3 if shape.gated else 2) * config.hidden_size * moe.expert_size
    return Parameters(
        attention=_attention(shape),
        experts=moe.experts * one,
        active_experts=moe.top_k * one,
        shared_experts=_feed_forward(shape, moe.shared_size) if moe.shared_size else 0,
        router=moe.experts * config.hidden_size,
        norms=norms,
    )


def _norm(shape: ModelShape) -> int:
    return shape.config.hidden_size * (2 if shape.norm_bias else 1)


def _inner_norms(shape: ModelShape) -> int:
    """Norms inside attention: of heads, or of latents."""
    config = shape.config
    if config.mla is not None:
        return (config.mla.query_rank or 0) + config.mla.key_value_rank
    return 2 * config.head_dim if config.qk_norm else 0


def _feed_forward(shape: ModelShape, inner: int) -> int:
    config = shape.config
    into = 2 if shape.gated else 1  # matrices into the inner width; one leads out
    elements = (into + 1) * config.hidden_size * inner
    return elements + (into * inner + config.hidden_size if config.mlp_bias else 0)


def _attention(shape: ModelShape) -> int:
    config = shape.config
    if config.mla is not None:
        return _latent_attention(shape)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    elements = config.hidden_size * (2 * queries + 2 * keys)
    elements += queries + 2 * keys if config.qkv_bias else 0
    return elements + (config.hidden_size if config.output_bias else 0)


def _latent_attention(shape: ModelShape) -> int:
    """Projections of MLA; biases are on the way down to the latents, and on the output."""
    config, mla = shape.config, shape.config.mla
    assert mla is not None
    hidden, heads = config.hidden_size, config.num_heads
    down = mla.key_value_rank + mla.rope_dim
    biases = down
    elements = hidden * down + mla.key_value_rank * heads * (mla.nope_dim + mla.value_dim)
    if mla.query_rank is None:
        elements += hidden * heads * config.head_dim
    else:
        elements += mla.query_rank * (hidden + heads * config.head_dim)
        biases += mla.query_rank
    elements += heads * mla.value_dim * hidden
    elements += biases if config.qkv_bias else 0
    return elements + (hidden if config.output_bias else 0)
