"""The arithmetic behind a memory, written out line by line."""

from __future__ import annotations

# L layers, D hidden, H heads, K key/value heads, E head_dim, F feed-forward, V vocabulary
from collections.abc import Iterable

from fivefold.core.layout import Layout
from fivefold.observe.format import size as in_units
from fivefold.plan.memory.block import block
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.memory.place import Place
from fivefold.plan.memory.serving import BITS, element_bytes, kv_bytes, kv_layer_bytes
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Software, Strategy, Training

ADAM = 12  # bytes a parameter: an fp32 master and two moments
MIXED = 16  # with 16-bit parameters and gradients


def total_parameters(shape: ModelShape) -> int:
    """All elements."""
    outer = sum(w.elements for part in outer_weights(shape).values() for w in part)
    return outer + sum(
        sum(w.elements for w in layer_weights(shape, shape.config.is_sparse(layer)))
        for layer in range(shape.config.num_layers)
    )


def explain_parameters(shape: ModelShape) -> list[str]:
    """Every matrix of a layer, the ends, and their sum."""
    config = shape.config
    found = []
    for sparse in sorted({config.is_sparse(i) for i in range(config.num_layers)}):
        count = sum(config.is_sparse(i) is sparse for i in range(config.num_layers))
        weights = layer_weights(shape, sparse)
        kind = " with experts" if sparse else ""
        found.append(f"a layer{kind}, of {count}:")
        found += [f"  {_line(weight)}" for weight in weights if weight.matrix]
        rest = sum(w.elements for w in weights if not w.matrix)
        found.append(f"  norms and biases: {rest:,}")
        each = sum(w.elements for w in weights)
        found.append(f"  together {each:,}; {count} layers: {count * each:,}")
    for name, part in outer_weights(shape).items():
        found += [f"{_line(weight)}" for weight in part]
        if name == "head" and not part:
            found.append("head.weight: the embedding's own")
    found.append(f"all parameters: {total_parameters(shape):,}")
    return found


def explain_state(shape: ModelShape, memory: float | None = None) -> list[str]:
    """Mixed-precision Adam: 2 + 2 + 12 bytes a parameter, against one device's `memory`."""
    count = total_parameters(shape)
    whole = MIXED * count
    found = [
        f"16-bit weights: 2 x {count:,} = {_both(2 * count)}",
        f"Adam in mixed precision: (4 master + 4 + 4 moments) x {count:,} = {_both(ADAM * count)}",
        f"with 16-bit weights and gradients: (2 + 2 + 12) x {count:,} = {_both(whole)}",
    ]
    if memory is not None:
        verdict = "holds" if whole <= memory else "does not hold"
        beside = " before any activations" if whole <= memory else ""
        found.append(
            f"a device of {in_units(memory)} {verdict} the whole training state"
            f" of {in_units(whole)}{beside}"
            + ("" if whole <= memory else f": {in_units(whole - memory)} too much")
        )
    return found


def explain_layers(
    shape: ModelShape, training: Training, strategy: Strategy, software: Software
) -> list[str]:
    """What a layer of the first stage keeps of one micro-batch for its backward."""
    place = Place.of(shape, training, strategy, software)
    found = []
    for sparse in sorted({shape.config.is_sparse(i) for i in range(shape.config.num_layers)}):
        kept = block(place, sparse, "accumulate").kept
        kind = " with experts" if sparse else ""
        found.append(
            f"a layer{kind} keeps of {place.inside:,} tokens (recompute {strategy.recompute}):"
        )
        found += [
            f"  {name}: {size:,} bytes, {size / place.inside:,.1f} a token"
            for name, size in kept.most_common()
        ]
        found.append(f"  together {kept.total():,} bytes")
    return found


def explain_cache(
    shape: ModelShape, context: int, sequences: int, form: str, layout: Layout | None = None
) -> list[str]:
    """The key/value cache of `sequences` of `context` tokens, as it is and in other formats."""
    layout = layout or Layout()
    config = shape.config
    each = kv_layer_bytes(shape, layout, form)
    number = element_bytes(form)
    if config.mla is not None:
        latent = f"({config.mla.key_value_rank} latent + {config.mla.rope_dim} turning)"
        product = f"{latent} x {number:g} bytes"
    else:
        heads = max(1, config.num_kv_heads // layout.tp)
        product = f"2 x {heads} heads x {config.head_dim} x {number:g} bytes"
    layers = -(-config.num_layers // layout.pp)
    whole = sequences * kv_bytes(shape, layout, context, form)
    found = [
        f"a token and layer: {product} = {each:,.0f} bytes",
        f"a token: {layers} layers x {each:,.0f} = {_both(layers * each)}",
        f"{sequences} x {context:,} tokens: {_both(whole)} in {form}"
        + (" (layers with windows hold no more than those)" if any(config.windows) else ""),
    ]
    if config.mla is None and config.num_kv_heads == config.num_heads:
        for groups in (config.num_heads // 4, config.num_heads // 8):
            if groups > 1:
                share = whole * groups / config.num_kv_heads
                found.append(f"with {groups} key/value heads (GQA): {in_units(share)}")
    for other in ("fp8", "nvfp4"):
        if other != form and BITS[other] < BITS[form]:
            size = sequences * kv_bytes(shape, layout, context, other)
            found.append(f"with the cache in {other}: {in_units(size)}")
    return found


def _line(weight: Weight) -> str:
    if not weight.matrix:
        return f"{weight.name}: {weight.elements:,}"
    return f"{weight.name}: {weight.rows:,} x {weight.row:,} = {weight.elements:,}"


def _both(size: float) -> str:
    """In units of ten, as papers have it, and of two, as devices are sold."""
    return f"{size / 1e9:,.2f} GB ({in_units(size)})"


def lines(*groups: Iterable[str]) -> str:
    """Groups with an empty line between them."""
    return "\n\n".join("\n".join(group) for group in groups)
