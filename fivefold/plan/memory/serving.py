"""What a serving rank holds: weights in their format, and a key/value cache by the token."""

from __future__ import annotations

from fractions import Fraction

from fivefold.core.errors import PlanError, nearest
from fivefold.core.layout import Layout
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.shape import ModelShape

# Bits of one element with what its scales take: a block of 32 shares 8 bits in MX formats (OCP MX
# 1.0), 16 share 8 in NVFP4, 128 share 16 in GPTQ and AWQ with a zero of 4 beside.
BITS: dict[str, Fraction] = {
    "fp32": Fraction(32),
    "bf16": Fraction(16),
    "fp16": Fraction(16),
    "fp8": Fraction(8),
    "int8": Fraction(8),
    "mxfp8": 8 + Fraction(8, 32),
    "mxfp4": 4 + Fraction(8, 32),
    "nvfp4": 4 + Fraction(8, 16),
    "int4": 4 + Fraction(20, 128),
}


def element_bytes(form: str) -> float:
    """Bytes of an element, its share of scales included. Raises PlanError for a format unknown."""
    if form not in BITS:
        raise PlanError(f"no format {form!r} of weights or caches", nearest(form, tuple(BITS)))
    return float(BITS[form] / 8)


def kv_bytes_per_token(shape: ModelShape, layout: Layout, dtype: str = "bf16") -> float:
    """What one token takes in the cache of a rank, over all layers that the rank has.

    Keys and values of each key/value head; of latent attention one latent and the part of the key
    that turns, which every tensor rank holds whole. Tensor ranks beyond the number of key/value
    heads hold copies. Layers with a window stop growing: see `kv_bytes`.
    """
    return kv_layer_bytes(shape, layout, dtype) * -(-shape.config.num_layers // layout.pp)


def kv_layer_bytes(shape: ModelShape, layout: Layout, dtype: str = "bf16") -> float:
    """The same of one layer."""
    config = shape.config
    if config.mla is not None:
        return (config.mla.key_value_rank + config.mla.rope_dim) * element_bytes(dtype)
    heads = max(1, config.num_kv_heads // layout.tp)
    return heads * (config.head_dim + config.value_dim) * element_bytes(dtype)


def kv_bytes(shape: ModelShape, layout: Layout, tokens: int, dtype: str = "bf16") -> float:
    """Of a context of `tokens`, in the layers of the first pipeline rank, windows as they are."""
    each = kv_layer_bytes(shape, layout, dtype)
    layers = shape.config.windows[: -(-shape.config.num_layers // layout.pp)]
    return each * sum(tokens if window is None else min(window, tokens) for window in layers)


def weights_bytes(shape: ModelShape, layout: Layout, form: str = "bf16") -> float:
    """Weights of the fullest pipeline rank.

    Quantized formats are those of matrices in layers: embedding, head, norms, biases and routers
    stay in 16 bits, as GPTQ, AWQ and published fp8 checkpoints have them.
    """
    bits = element_bytes(form)
    plain = bits if form in ("fp32", "bf16", "fp16") else element_bytes("bf16")
    config = shape.config
    outer = outer_weights(shape, layout.tp)
    ends = {
        0: sum(w.elements for w in outer["embedding"]) * plain,
        layout.pp - 1: sum(w.elements for w in (*outer["norm"], *outer["head"])) * plain,
    }
    if layout.pp == 1:
        ends = {0: sum(w.elements for part in outer.values() for w in part) * plain}
    elif config.tie_embeddings:
        ends[layout.pp - 1] += ends[0]
    each = -(-config.num_layers // layout.pp)
    most = 0.0
    for rank in range(layout.pp):
        layers = range(rank * each, min((rank + 1) * each, config.num_layers))
        inside = sum(
            _weight_bytes(weight, bits, plain)
            for layer in layers
            for weight in layer_weights(shape, config.is_sparse(layer), layout.tp, layout.ep)
        )
        most = max(most, inside + ends.get(rank, 0.0))
    return most


def _weight_bytes(weight: Weight, bits: float, plain: float) -> float:
    quantized = weight.matrix and "router" not in weight.name
    return weight.elements * (bits if quantized else plain)
