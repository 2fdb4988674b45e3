"""What one rank of an engine computes with: its matrices, its experts, its keys and values.

D hidden, H heads, K kv heads, E head dim, F feed-forward width, V vocabulary. Each is that of one
rank: `tp` divides heads, widths and the vocabulary; keys and values of fewer heads than ranks are
held more than once, and the latent of MLA is held by every rank (DeepSeek-AI 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fivefold.core.errors import PlanError
from fivefold.model.config import ModelConfig
from fivefold.plan.serving.formats import bytes_of
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.shape import ModelShape


@dataclass(frozen=True)
class Matrix:
    """[inputs, outputs] of one rank, in each of `layers` layers, with weights in `form`."""

    name: str
    inputs: float
    outputs: float
    layers: int
    form: str

    @property
    def elements(self) -> float:
        """Of one layer."""
        return self.inputs * self.outputs

    @property
    def bytes(self) -> float:
        """Of one layer's weights."""
        return self.elements * bytes_of(self.form)


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: `count` in all, `top_k` for a token, `ways` ranks hold them."""

    count: int
    top_k: int
    elements: float  # of one whole expert
    matrices: int  # products of an expert: 2, or 3 with a gate (gate and up are one product)
    layers: int
    ways: int
    ep: int
    form: str


@dataclass(frozen=True)
class Attention:
    """Of one layer on one rank.

    pair: operations of one query and one key (scores and sums); latent_pair: the same in decode,
    where MLA works on latents. token_bytes: keys and values of one token. windows: (window or
    None, layers with it).
    """

    pair: float
    latent_pair: float
    token_bytes: float
    windows: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class Work:
    """Everything that one rank of the stage with most layers computes in a step."""

    matrices: tuple[Matrix, ...]
    head: Matrix
    embedding_bytes: float
    experts: Experts | None
    attention: Attention
    hidden: int
    layers: int
    dense_layers: int
    small_bytes: float  # norms, biases, positions
    latent: bool

    @property
    def expert_bytes(self) -> float:
        """Experts' weights on one rank."""
        if self.experts is None:
            return 0.0
        each = self.experts.elements * bytes_of(self.experts.form)
        return each * self.experts.count * self.experts.layers / self.experts.ways

    @property
    def weight_bytes(self) -> float:
        """All weights on one rank."""
        matrices = sum(matrix.bytes * matrix.layers for matrix in self.matrices)
        ends = self.head.bytes + self.embedding_bytes + self.small_bytes
        return matrices + self.expert_bytes + ends

    @property
    def token_bytes(self) -> float:
        """Keys and values of one token in all layers of the rank, windows aside."""
        return self.attention.token_bytes * self.layers


@lru_cache(maxsize=4096)
def work(shape: ModelShape, strategy: ServingStrategy) -> Work:
    """Of the stage with most layers. Raises PlanError for ways that do not divide the model."""
    config, layout = shape.config, strategy.layout
    _check(shape.name, config, strategy)
    tp, stages = layout.tp, layout.pp
    layers = -(-config.num_layers // stages)
    share = layers / config.num_layers
    sparse = round(sum(map(config.is_sparse, range(config.num_layers))) * share)
    dense = layers - sparse
    columns = 2 if shape.gated else 1
    matrices = [*_attention_matrices(config, tp, layers, strategy.weights)]
    if dense:
        width = config.intermediate_size / tp
        matrices += [
            Matrix("up", config.hidden_size, columns * width, dense, strategy.weights),
            Matrix("down", width, config.hidden_size, dense, strategy.weights),
        ]
    if sparse:
        matrices += _beside_experts(config, tp, sparse, strategy.weights)
    ends = "bf16" if bytes_of(strategy.weights) < 2 else strategy.weights
    head = Matrix("head", config.hidden_size, config.vocab_size / tp, 1, ends)
    # Of a pipeline one end has the embedding and the other the head.
    looked_up = 0.0 if config.tie_embeddings or stages > 1 else head.bytes
    learned = shape.learned_positions * config.hidden_size * bytes_of(ends)
    norms = config.hidden_size * (2 * layers + 1) * (2 if shape.norm_bias else 1) * bytes_of(ends)
    return Work(
        matrices=tuple(matrices),
        head=head,
        embedding_bytes=looked_up,
        experts=_experts(shape, strategy, sparse),
        attention=_attention(config, strategy, layers),
        hidden=config.hidden_size,
        layers=layers,
        dense_layers=dense,
        small_bytes=learned + norms,
        latent=config.mla is not None,
    )


def _attention_matrices(config: ModelConfig, tp: int, layers: int, form: str) -> list[Matrix]:
    hidden, heads = config.hidden_size, config.num_heads / tp
    if config.mla is None:
        held = _kv_heads(config, tp)
        wide = (heads + 2 * held) * config.head_dim
        return [
            Matrix("query, key, value", hidden, wide, layers, form),
            Matrix("attention output", heads * config.head_dim, hidden, layers, form),
        ]
    mla = config.mla
    key = mla.nope_dim + mla.rope_dim
    latent = mla.key_value_rank + mla.rope_dim + (mla.query_rank or 0)
    query = mla.query_rank or hidden
    unfold = heads * (mla.nope_dim + mla.value_dim)
    return [
        Matrix("latents", hidden, latent, layers, form),
        Matrix("query", query, heads * key, layers, form),
        # In decode it multiplies queries and sums instead of keys and values: the same elements.
        Matrix(
            "key, value", mla.key_value_rank, unfold, layers, "bf16" if form != "fp32" else form
        ),
        Matrix("attention output", heads * mla.value_dim, hidden, layers, form),
    ]


def _beside_experts(config: ModelConfig, tp: int, layers: int, form: str) -> list[Matrix]:
    assert config.moe is not None
    found = [Matrix("router", config.hidden_size, config.moe.experts, layers, "bf16")]
    if config.moe.shared_size:
        width = config.moe.shared_size / tp
        found += [
            Matrix("shared up", config.hidden_size, 2 * width, layers, form),
            Matrix("shared down", width, config.hidden_size, layers, form),
        ]
    return found


def _experts(shape: ModelShape, strategy: ServingStrategy, layers: int) -> Experts | None:
    moe = shape.config.moe
    if moe is None or not layers:
        return None
    parts = 3 if shape.gated else 2
    return Experts(
        count=moe.experts,
        top_k=moe.top_k,
        elements=parts * shape.config.hidden_size * moe.expert_size,
        matrices=parts,
        layers=layers,
        ways=strategy.expert_ways,
        ep=strategy.layout.ep,
        form=strategy.expert_format,
    )


def _attention(config: ModelConfig, strategy: ServingStrategy, layers: int) -> Attention:
    heads = config.num_heads / strategy.layout.tp
    pair = 2 * heads * (config.head_dim + config.value_dim)
    latent_pair, width = pair, 2 * _kv_heads(config, strategy.layout.tp) * config.head_dim
    if config.mla is not None:
        width = config.mla.key_value_rank + config.mla.rope_dim
        latent_pair = 2 * heads * (width + config.mla.key_value_rank)
    counts: dict[int | None, int] = {}
    for window in config.windows or (None,) * config.num_layers:
        counts[window] = counts.get(window, 0) + 1
    scale = layers / config.num_layers
    windows = tuple((window, max(1, round(count * scale))) for window, count in counts.items())
    return Attention(pair, latent_pair, width * bytes_of(strategy.kv), windows)


def _kv_heads(config: ModelConfig, tp: int) -> float:
    return max(1.0, config.num_kv_heads / tp)


def _check(name: str, config: ModelConfig, strategy: ServingStrategy) -> None:
    layout = strategy.layout
    for count, what in ((config.num_heads, "heads"), (config.vocab_size, "words")):
        if what == "heads" and count % layout.tp:
            raise PlanError(
                f"tp={layout.tp} does not divide the {count} attention heads of {name}",
                f"use tp={_below(count, layout.tp)}",
            )
    if layout.pp > config.num_layers:
        raise PlanError(
            f"pp={layout.pp} is more than the {config.num_layers} layers of {name}",
            f"use pp={config.num_layers} at most",
        )
    experts = 1 if config.moe is None else config.moe.experts
    if layout.ep > 1 and config.moe is None:
        raise PlanError(f"ep={layout.ep}, but {name} has no experts", "use ep=1")
    if experts % layout.ep or strategy.expert_ways % layout.ep:
        raise PlanError(
            f"ep={layout.ep} must divide the {experts} experts of {name} and the"
            f" {strategy.expert_ways} ranks of tp x dp_shard",
            f"use ep={_below(strategy.expert_ways, layout.ep)}",
        )


def _below(count: int, wanted: int) -> int:
    return max(ways for ways in range(1, wanted + 1) if count % ways == 0)
