"""Attention over context ranks on a tape: a ring, gathered keys, or heads shared out."""

from __future__ import annotations

# N tokens here, H query heads, K key/value heads, E head_dim, G dims of a value
import math

from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.tape import Tape, Value

NAME = "attention"
MESSAGES = "key/value messages"
LOG_SUM = 8  # bytes: log-sum-exp is joined in fp64


def context_attention(
    tape: Tape, place: Place, query: Value, key: Value, value: Value, kv_heads: int
) -> Value:
    """Of queries that are here to keys that are everywhere."""
    if place.ulysses == 1:
        return _over_tokens(tape, place, query, key, value, place.heads, kv_heads, place.cp, 1)
    config, element = place.shape.config, place.element
    copies = place.ulysses // math.gcd(kv_heads, place.ulysses)
    widths = (
        place.heads * config.head_dim,
        kv_heads * copies * config.head_dim,
        kv_heads * copies * config.value_dim,
    )
    each = [place.inside * width * element for width in widths]
    whole = sum(each)
    # Joined, put in the order of ranks, exchanged, put in the order of places.
    joined = tape.op(NAME, whole, [(query, None), (key, each[1]), (value, each[2])])
    leaving = tape.op(NAME, whole, [(joined, whole)])
    tape.free(joined)
    arrived = tape.op(NAME, whole, [(leaving, whole)])
    tape.free(leaving)
    mixed = tape.op(NAME, whole, [(arrived, whole)])
    tape.free(arrived)
    parts = tape.op_view(mixed, whole), tape.op_view(mixed, whole), tape.op_view(mixed, whole)
    ways = place.cp // place.ulysses
    heads, few = place.heads // place.ulysses, kv_heads * copies // place.ulysses
    attended = _over_tokens(tape, place, *parts, heads, few, ways, place.ulysses)
    out = place.inside * place.heads * config.value_dim * element
    there = tape.op(NAME, out, [(attended, out)])
    back = tape.op(NAME, out, [(there, out)])
    tape.free(there)
    result = tape.op(NAME, out, [(back, out)])
    tape.free(back, attended, mixed, *parts)
    return result


def _over_tokens(
    tape: Tape,
    place: Place,
    query: Value,
    key: Value,
    value: Value,
    heads: int,
    kv_heads: int,
    ways: int,
    times: int,
) -> Value:
    """`times` as many tokens as a rank has, of a row that `ways` such groups divide."""
    config, element = place.shape.config, place.element
    rows = place.inside * times
    wide_out = rows * heads * config.value_dim * WIDE
    out = rows * heads * config.value_dim * element
    message = rows * kv_heads * (config.head_dim + config.value_dim)
    of_query = rows * heads * config.head_dim * element
    of_key, of_value = (
        rows * kv_heads * dim * element for dim in (config.head_dim, config.value_dim)
    )
    if ways == 1:
        return tape.op(
            NAME, out, [(query, of_query), (key, of_key), (value, of_value)],
            saves=[query.storage, key.storage, value.storage], saves_output=True,
            extra=rows * heads * WIDE, product=True,
        )  # fmt: skip
    forward_keys = (2 if place.ring == "ring" else ways) * message * element
    # The result so far, a block's, and both joined, in fp32; the joined log-sum-exp.
    working = 3 * wide_out + rows * heads * (2 * LOG_SUM + WIDE)
    tape.hold_now(MESSAGES, forward_keys)
    tape.hold_now(NAME, working)
    tape.let_go(NAME, working)
    tape.let_go(MESSAGES, forward_keys)
    tape.hold_now(NAME, wide_out)
    found = tape.op(
        NAME, out, [(query, of_query), (key, of_key), (value, of_value)],
        saves=[query.storage, key.storage, value.storage], saves_output=True,
        extra=rows * heads * WIDE,
        temporary=(_backward(place, of_query, message, ways),),
    )  # fmt: skip
    tape.let_go(NAME, wide_out)
    # Its heads are outermost: a copy brings those of a token together.
    result = tape.op(NAME, out, [(found, None)])
    tape.free(found)
    return result


def _backward(place: Place, of_query: int, message: int, ways: int) -> int:
    """The most bytes in backward: the query's gradient in fp32, a block's gradients in both formats,
    keys and values, and gradients of them in fp32, of `message` elements each."""
    element = place.element
    both = element + WIDE if element < WIDE else WIDE
    query = of_query // element
    if place.ring == "gather":
        block = query * (WIDE + both) + message * (both + ways * (element + WIDE))
        # Gradients of all keys, once more in the order of ranks, and this rank's sum of them.
        scatter = query * WIDE + message * (ways * (element + 2 * WIDE) + WIDE)
        return int(max(block, scatter))
    # First this rank's own keys, while others come; then, of half of the queries, others' keys, with
    # what goes home at the end and what is passed on.
    own = query * (WIDE + both) + message * (both + WIDE + 2 * element)
    moving = 2 if ways == 2 else 4
    keys = 2 if ways > 3 else 1
    later = query * (WIDE + both / 2) + message * (both + moving * WIDE + keys * element)
    return int(max(own, later))
