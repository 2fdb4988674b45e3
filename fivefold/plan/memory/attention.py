"""Attention of one layer on a tape: what is kept, and what lives beside it."""

from __future__ import annotations

# N tokens, D hidden, H query heads, K key/value heads, E head_dim, G dims of a value, P turning dims
from fivefold.model.config import MLAConfig
from fivefold.plan.memory.context import context_attention
from fivefold.plan.memory.pieces import again_from, enter, leave, linear, norm
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.tape import Tape, Value

NAME = "attention"


def attention(tape: Tape, place: Place, x: Value) -> Value:
    """Of normalised hidden states between blocks, to the same."""
    hidden = enter(tape, place, x)
    mla = place.shape.config.mla
    body = _grouped(tape, place, hidden, x) if mla is None else _latent(tape, place, mla, hidden, x)
    result = leave(tape, place, body)
    tape.free(hidden)
    return result


def _grouped(tape: Tape, place: Place, hidden: Value, entered: Value) -> Value:
    config, rows = place.shape.config, place.inside
    dim, size = config.head_dim, config.hidden_size

    def project(heads: int) -> Value:
        return linear(
            tape, place, NAME, hidden, rows, size, heads * dim,
            bias=config.qkv_bias, entered=_gathered(place, entered),
        )  # fmt: skip

    def normed(x: Value, heads: int) -> Value:
        if not config.qk_norm:
            return x
        found = norm(tape, place, x, rows * heads, dim)
        tape.free(x)
        return found

    query = normed(project(place.heads), place.heads)
    key = normed(project(place.kv_heads), place.kv_heads)
    turned = [
        turn(tape, place, query, place.heads * dim),
        turn(tape, place, key, place.kv_heads * dim),
    ]
    value = project(place.kv_heads)
    attended = attend(tape, place, turned[0], turned[1], value, place.kv_heads)
    tape.free(*turned, value)
    found = linear(
        tape, place, NAME, attended, rows, place.heads * dim, size,
        bias=config.output_bias and place.tp == 1,
    )  # fmt: skip
    tape.free(attended, query, key)
    return found


def turn(tape: Tape, place: Place, x: Value, width: int) -> Value:
    """Rotary positions; without them the tensor itself."""
    if place.shape.learned_positions:
        return tape.view(x)
    size = place.inside * width * place.element
    return tape.op(NAME, size, [(x, size)])


def _gathered(place: Place, entered: Value) -> Value | None:
    return entered if place.tensor > 1 else None


def _latent(tape: Tape, place: Place, mla: MLAConfig, hidden: Value, entered: Value) -> Value:
    """Latent attention: heads unfold from latents, parts are cut off and joined by copies."""
    config, rows, element = place.shape.config, place.inside, place.element
    size, heads = config.hidden_size, place.heads
    first = _gathered(place, entered)
    bias = config.qkv_bias
    if mla.query_rank is None:
        query = linear(
            tape, place, NAME, hidden, rows, size, heads * config.head_dim, entered=first
        )
    else:
        down = linear(
            tape, place, NAME, hidden, rows, size, mla.query_rank, bias=bias, entered=first
        )
        latent = norm(tape, place, down, rows, mla.query_rank)
        tape.free(down)
        query = linear(tape, place, NAME, latent, rows, mla.query_rank, heads * config.head_dim)
        tape.free(latent)
    whole = rows * heads * config.head_dim * element
    turned = _turn_part(tape, place, query, heads * mla.rope_dim, whole)
    joined = tape.op(NAME, whole, [(query, None), (turned, None)])
    tape.free(turned)
    width = mla.key_value_rank + mla.rope_dim
    latents = linear(tape, place, NAME, hidden, rows, size, width, bias=bias, entered=first)
    normed = tape.op(
        "norms", rows * mla.key_value_rank * element, [(latents, rows * width * element)],
        saves=[latents.storage], extra=rows * WIDE, weights=(mla.key_value_rank * element,),
    )  # fmt: skip
    again_from(place, normed, latents)
    unfolded_width = heads * (mla.nope_dim + mla.value_dim)
    unfolded = linear(tape, place, NAME, normed, rows, mla.key_value_rank, unfolded_width)
    tape.free(normed)
    shared = _turn_part(tape, place, latents, mla.rope_dim, rows * width * element)
    key = tape.op(NAME, whole, [(unfolded, rows * unfolded_width * element), (shared, None)])
    value = tape.op_view(unfolded, rows * unfolded_width * element)
    attended = attend(tape, place, joined, key, value, heads)
    found = linear(
        tape, place, NAME, attended, rows, heads * mla.value_dim, size,
        bias=config.output_bias and place.tp == 1,
    )  # fmt: skip
    tape.free(attended, joined, query, latents, unfolded, shared, key, value)
    return found


def _turn_part(tape: Tape, place: Place, x: Value, width: int, whole: int) -> Value:
    """The dims that turn, put apart and turned; backward fills a whole gradient from the parts'."""
    size = place.inside * width * place.element
    assert place.shape.config.mla is not None
    if place.shape.config.mla.interleaved:
        apart = tape.op(NAME, size, [(x, whole)])
        found = tape.op(NAME, size, [(apart, size)])
        tape.free(apart)
        return found
    return tape.op(NAME, size, [(x, whole)])


def attend(
    tape: Tape, place: Place, query: Value, key: Value, value: Value, kv_heads: int
) -> Value:
    """The core: by blocks (fused), over context ranks, or with all scores in memory."""
    if place.cp > 1:
        return context_attention(tape, place, query, key, value, kv_heads)
    config, rows, heads = place.shape.config, place.inside, place.heads
    sizes = _operands(place, kv_heads)
    out = rows * heads * config.value_dim * place.element
    inputs = list(zip((query, key, value), sizes, strict=True))
    if place.software.fused_attention:
        return tape.op(
            NAME, out, inputs, saves=[query.storage, key.storage, value.storage],
            saves_output=True, extra=rows * heads * WIDE, product=True,
        )  # fmt: skip
    return _unfused(tape, place, inputs, out)


def _operands(place: Place, kv_heads: int) -> tuple[int, int, int]:
    """Bytes of the gradients of query, key and value."""
    config, each = place.shape.config, place.inside * place.element
    return (
        each * place.heads * config.head_dim,
        each * kv_heads * config.head_dim,
        each * kv_heads * config.value_dim,
    )


def _unfused(tape: Tape, place: Place, inputs: list[tuple[Value, int]], out: int) -> Value:
    """All scores [B,H,S,S] (Korthikanti et al. 2022): softmax's result, a mask, what is left."""
    (query, of_query), (key, of_key), (value, of_value) = inputs
    square = place.inside * place.heads * place.length * place.element
    if place.recompute == "selective" and place.software.selective == "attention":
        again = [square, square]
        if place.software.dropout:
            again += [square, square // place.element]
        return tape.op(
            NAME, out, inputs, saves=[query.storage, key.storage, value.storage],
            temporary=(*again, square),
        )  # fmt: skip
    scores = tape.op(
        NAME, square, [(query, of_query), (key, of_key)], saves=[query.storage, key.storage]
    )
    weights = tape.op("scores", square, [(scores, square)], saves_output=True)
    tape.free(scores)
    if place.software.dropout:
        left = tape.op(
            "scores",
            square,
            [(weights, square)],
            extra=square // place.element,
            extra_name="scores",
        )
        tape.free(weights)
        weights = left
    found = tape.op(
        NAME, out, [(weights, square), (value, of_value)], saves=[weights.storage, value.storage]
    )
    tape.free(weights)
    return found
