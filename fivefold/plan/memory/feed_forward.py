"""A dense feed-forward on a tape."""

from __future__ import annotations

# N tokens, D hidden, F feed-forward columns here
from fivefold.plan.memory.pieces import enter, gated_linear, leave, linear
from fivefold.plan.memory.place import Place
from fivefold.plan.memory.tape import Tape, Value


def feed_forward(
    tape: Tape, place: Place, x: Value, size: int, *, name: str = "feed_forward", last: bool = True
) -> Value:
    """Of hidden states between blocks, with an inner width of `size`; `last`: of the block."""
    config, rows = place.shape.config, place.inside
    wide, narrow = place.columns(size), config.hidden_size
    entered = x if place.tensor > 1 else None
    hidden = enter(tape, place, x)
    inner = rows * wide * place.element
    up = [
        linear(tape, place, name, hidden, rows, narrow, wide, bias=config.mlp_bias, entered=entered)
        for _ in range(2 if place.shape.gated else 1)
    ]
    bias = config.mlp_bias and place.tp == 1
    if place.remakes:
        found = gated_linear(tape, place, name, up, rows, wide, narrow, bias=bias)
        tape.free(*up)
    else:
        active = tape.op(name, inner, [(x, inner) for x in up], saves=[x.storage for x in up])
        tape.free(*up)
        if last:
            tape.last()
        found = linear(tape, place, name, active, rows, wide, narrow, bias=bias)
        tape.free(active)
    result = leave(tape, place, found)
    tape.free(hidden)
    return result
