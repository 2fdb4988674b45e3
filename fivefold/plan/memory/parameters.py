"""Every parameter of a decoder as numbers: its rows, the elements of a row, what of it a rank holds.

Names are the decoder's own, without the number of the layer; `axes.tp.plan` says by them how tensor
ranks divide each. Counted is the first rank of every axis, which holds no less than any other.
"""

from __future__ import annotations

# D hidden, H query heads, K key/value heads, E head_dim, G dims of a value, F feed-forward, X experts
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fivefold.axes.tp.plan import rule, share
from fivefold.model.config import MLAConfig, ModelConfig
from fivefold.plan.shape import ModelShape


@dataclass(frozen=True)
class Weight:
    """One parameter, or the box of it that a tensor rank (or expert rank) holds.

    rows: of dim 0, which data ranks divide; row: elements of each. expert: one of the stacked.
    """

    name: str
    rows: int
    row: int
    expert: bool = False
    matrix: bool = True

    @property
    def elements(self) -> int:
        """Rows times elements of a row."""
        return self.rows * self.row

    def shard(self, ranks: int) -> int:
        """Elements of the first of `ranks` that divide the rows, as torch.chunk does."""
        return -(-self.rows // ranks) * self.row


@cache
def layer_weights(shape: ModelShape, sparse: bool, tp: int = 1, ep: int = 1) -> tuple[Weight, ...]:
    """Of one layer; `sparse`: its feed-forward is a mixture of experts."""
    found = []
    for name, *dims in _layer(shape, sparse):
        expert = ".experts." in name
        if expert:
            dims[0] //= ep
        else:
            dims = _divided(f"layers.0.{name}", dims, shape.config, tp)
        row = 1
        for dim in dims[1:]:
            row *= dim
        found.append(Weight(name, dims[0], row, expert, len(dims) > 1))
    return tuple(found)


@cache
def outer_weights(shape: ModelShape, tp: int = 1) -> dict[str, tuple[Weight, ...]]:
    """`embedding` (with learned positions), `norm` at the end, and `head`, none where it is tied."""
    config = shape.config
    table = [config.vocab_size, config.hidden_size]
    embedding = [_table("embedding.weight", table, config, tp)]
    if shape.learned_positions:
        embedding.append(Weight("positions.weight", shape.learned_positions, config.hidden_size))
    head = _table("head.weight", table, config, tp)
    return {
        "embedding": tuple(embedding),
        "norm": tuple(Weight(n, d, 1, matrix=False) for n, d in _norm("norm", shape)),
        "head": () if config.tie_embeddings else (head,),
    }


def _table(name: str, dims: list[int], config: ModelConfig, tp: int) -> Weight:
    rows, row = _divided(name, dims, config, tp)
    return Weight(name, rows, row)


def _divided(name: str, dims: list[int], config: ModelConfig, tp: int) -> list[int]:
    split = rule(name)
    if tp == 1 or split is None:
        return list(dims)
    found = list(dims)
    found[split.dim] = share(dims[split.dim], split, config, 0, tp)[1]
    return found


def _layer(shape: ModelShape, sparse: bool) -> Iterator[tuple[str, *tuple[int, ...]]]:
    """(name, *dims) of every parameter, whole."""
    config = shape.config
    yield from _norm("attention_norm", shape)
    yield from (_attention(config) if config.mla is None else _latent_attention(config, config.mla))
    yield from _norm("feed_forward_norm", shape)
    if config.post_norms:
        yield from _norm("attention_post_norm", shape)
        yield from _norm("feed_forward_post_norm", shape)
    if not sparse:
        yield from _feed_forward(shape, "feed_forward", config.intermediate_size)
        return
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "a sparse layer has experts"
    yield "feed_forward.router.weight", moe.experts, hidden
    for name in ("gate", "up"):
        yield f"feed_forward.experts.{name}", moe.experts, moe.expert_size, hidden
    yield "feed_forward.experts.down", moe.experts, hidden, moe.expert_size
    if moe.shared_size:
        yield from _feed_forward(shape, "feed_forward.shared", moe.shared_size)


def _norm(name: str, shape: ModelShape) -> Iterator[tuple[str, int]]:
    yield f"{name}.weight", shape.config.hidden_size
    if shape.norm_bias:
        yield f"{name}.bias", shape.config.hidden_size


def _attention(config: ModelConfig) -> Iterator[tuple[str, *tuple[int, ...]]]:
    hidden = config.hidden_size
    sizes = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    for name, heads in sizes.items():
        yield from _projection(
            f"attention.{name}", heads * config.head_dim, hidden, config.qkv_bias
        )
    wide = config.num_heads * config.head_dim
    yield from _projection("attention.output", hidden, wide, config.output_bias)
    if config.qk_norm:
        yield "attention.query_norm.weight", config.head_dim
        yield "attention.key_norm.weight", config.head_dim


def _latent_attention(
    config: ModelConfig, mla: MLAConfig
) -> Iterator[tuple[str, *tuple[int, ...]]]:
    hidden, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
    if mla.query_rank is None:
        yield "attention.query.weight", heads * config.head_dim, hidden
    else:
        yield from _projection("attention.query_down", mla.query_rank, hidden, bias)
        yield "attention.query_norm.weight", mla.query_rank
        yield "attention.query_up.weight", heads * config.head_dim, mla.query_rank
    latent = mla.key_value_rank + mla.rope_dim
    yield from _projection("attention.key_value_down", latent, hidden, bias)
    yield "attention.key_value_norm.weight", mla.key_value_rank
    unfolded = heads * (mla.nope_dim + mla.value_dim)
    yield "attention.key_value_up.weight", unfolded, mla.key_value_rank
    yield from _projection("attention.output", hidden, heads * mla.value_dim, config.output_bias)


def _feed_forward(
    shape: ModelShape, name: str, size: int
) -> Iterator[tuple[str, *tuple[int, ...]]]:
    hidden, bias = shape.config.hidden_size, shape.config.mlp_bias
    if shape.gated:
        yield from _projection(f"{name}.gate", size, hidden, bias)
    yield from _projection(f"{name}.up", size, hidden, bias)
    yield from _projection(f"{name}.down", hidden, size, bias)


def _projection(
    name: str, outputs: int, inputs: int, bias: bool
) -> Iterator[tuple[str, *tuple[int, ...]]]:
    yield f"{name}.weight", outputs, inputs
    if bias:
        yield f"{name}.bias", outputs
