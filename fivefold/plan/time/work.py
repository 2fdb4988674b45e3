"""What one rank has of a layer and a micro-batch: tokens, products, bytes of elementwise passes."""

from __future__ import annotations

# n tokens, D hidden, H query heads, K key/value heads, E head_dim, G dims of a value, F feed-forward
from dataclasses import dataclass
from functools import lru_cache

from fivefold.plan.memory.parameters import Weight, layer_weights
from fivefold.plan.memory.place import Place
from fivefold.plan.shape import ModelShape

# Weights that take the same input are one product, as all systems have it or could.
TOGETHER = {
    "key": "query", "value": "query", "up": "gate", "key_value_down": "query_down",
}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """Rows times a matrix of `inputs` x `outputs`; `experts`: so many matrices share the rows."""

    inputs: int
    outputs: int
    experts: int = 0

    def flops(self, rows: float) -> float:
        """Of all rows."""
        return 2.0 * rows * self.inputs * self.outputs

    @property
    def aligned(self) -> bool:
        """Whether rows of all matrices are whole 16 bytes, of 2 an element."""
        return self.inputs % 8 == 0 and self.outputs % 8 == 0

    @property
    def elements(self) -> int:
        """Of all matrices here."""
        return self.inputs * self.outputs * max(1, self.experts)


@lru_cache(maxsize=4096)
def products(shape: ModelShape, sparse: bool, tp: int, ep: int) -> tuple[Product, ...]:
    """Matrix products of a layer on one tensor rank."""
    found: dict[str, Product] = {}
    for weight in layer_weights(shape, sparse, tp, ep):
        if not weight.matrix:
            continue
        made = _product(shape, weight)
        module, _, leaf = weight.name.removesuffix(".weight").rpartition(".")
        name = f"{module}.{TOGETHER.get(leaf, leaf)}"
        if name in found:
            made = Product(made.inputs, found[name].outputs + made.outputs, made.experts)
        found[name] = made
    return tuple(found.values())


def _product(shape: ModelShape, weight: Weight) -> Product:
    if not weight.expert:
        return Product(weight.row, weight.rows)
    moe = shape.config.moe
    assert moe is not None, "experts have a size"
    return Product(shape.config.hidden_size, moe.expert_size, weight.rows)


def rows(place: Place, product: Product) -> float:
    """Rows that meet the product: all tokens here, or those routed to the experts here."""
    moe = place.shape.config.moe
    if not product.experts:
        return place.inside
    assert moe is not None, "experts have a number to choose"
    return place.inside / place.tp * moe.top_k * place.software.imbalance


def outer_bytes(place: Place, backward: bool) -> float:
    """Norms and residual sums, which every rank does for its tokens between blocks.

    Forward: a norm reads and writes (2 e D), a sum reads two and writes one (3 e D), a mask is one
    byte. Backward: a norm reads two, writes one and adds to the residual's gradient (5 e D); dropout
    reads and writes (2 e D) and reads its mask; a bias sums its gradient (e D).
    """
    config, element = place.shape.config, place.element
    norms = 4 if config.post_norms else 2
    dropped = 2.0 if place.software.dropout else 0.0
    if backward:
        biases = 2.0 * element if config.output_bias else 0.0
        width = norms * 5 * element + dropped * (2 * element + 1) + biases
    else:
        width = norms * 2 * element + 2 * 3 * element + dropped
    return place.tokens * config.hidden_size * width


def inner_bytes(place: Place, sparse: bool, backward: bool) -> float:
    """Activation, rotary positions and norms of heads, over the columns and heads here."""
    config, element = place.shape.config, place.element
    turned = 0.0 if place.shape.learned_positions else 2
    turned += 4 if config.qk_norm and backward else 2 if config.qk_norm else 0
    heads = (place.heads + place.kv_heads) * config.head_dim * element
    copied = (
        2 * place.heads * config.value_dim * element if not place.software.fused_attention else 0
    )
    found = place.inside * (turned * heads + copied)
    moe = config.moe
    if not sparse or moe is None:
        return found + place.inside * _activated(
            place, config.intermediate_size // place.tp, backward
        )
    found += place.inside * _activated(place, moe.shared_size // place.tp, backward)
    routed = place.inside / place.tp * moe.top_k * place.software.imbalance
    # Rows are brought into the order of their experts and back, there and here: read and written.
    moved = 8 * config.hidden_size * element
    return found + routed * (_activated(place, moe.expert_size, backward) + moved)


def _activated(place: Place, width: float, backward: bool) -> float:
    """Bytes a token. Gated: two in, one out; backward three in, two out. Else one and one; two, one."""
    if place.shape.gated:
        return width * place.element * (5 if backward else 3)
    biases = 1 if backward and place.shape.config.mlp_bias else 0
    return width * place.element * ((3 if backward else 2) + biases)


@dataclass(frozen=True)
class Kinds:
    """What a part of the model has: kinds of layers, by window and whether they have experts, with
    how many of each; and whether it embeds, and makes logits.
    """

    layers: tuple[tuple[int | None, bool, int], ...]
    first: bool
    last: bool


@lru_cache(maxsize=65536)
def kinds(shape: ModelShape, layers: range) -> Kinds:
    """Of neighbouring layers."""
    found: dict[tuple[int | None, bool], int] = {}
    config = shape.config
    for layer in layers:
        kind = config.windows[layer], config.is_sparse(layer)
        found[kind] = found.get(kind, 0) + 1
    listed = tuple((window, sparse, count) for (window, sparse), count in found.items())
    return Kinds(listed, layers.start == 0, layers.stop == config.num_layers)
