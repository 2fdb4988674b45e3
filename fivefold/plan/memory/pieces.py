"""The operators that blocks are made of, on a tape."""

from __future__ import annotations

# D hidden, N tokens inside a divided module, n between blocks
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.tape import Tape, Value


def norm(tape: Tape, place: Place, x: Value, rows: int, width: int) -> Value:
    """Keeps its input and a number a row (two with LayerNorm)."""
    size, numbers = rows * width * place.element, 2 if place.shape.norm_bias else 1
    found = tape.op(
        "norms", size, [(x, size)], saves=[x.storage], extra=rows * numbers * WIDE,
        weights=(width * place.element,) * numbers,
    )  # fmt: skip
    return again_from(place, found, x)


def again_from(place: Place, normed: Value, x: Value) -> Value:
    """A norm's result, which backward makes again from `x`."""
    normed.made_from = x.storage if place.remakes else None
    return normed


def linear(
    tape: Tape,
    place: Place,
    name: str,
    x: Value,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    entered: Value | None = None,
) -> Value:
    """A product; it keeps its operand, or what that was gathered from and is gathered from again."""
    element = place.element
    again = entered is not None and not place.software.keeps_gathered
    kept = (entered if again and entered is not None else x).storage
    operand = rows * inputs * element
    return tape.op(
        name, rows * outputs * element, [(x, operand)],
        saves=[x.made_from or kept],
        weights=(outputs * inputs * element, outputs * element)[: 2 if bias else 1],
        temporary=(operand,) if again else (), remade=operand if x.made_from else 0,
        product=True, operand=kept,
    )  # fmt: skip


def gated_linear(
    tape: Tape,
    place: Place,
    name: str,
    halves: list[Value],
    rows: int,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
) -> Value:
    """A product of what gate and up make; it keeps them, and makes its operand again."""
    element = place.element
    operand = rows * inputs * element
    return tape.op(
        name, rows * outputs * element, [(half, operand) for half in halves],
        saves=[half.storage for half in halves],
        weights=(outputs * inputs * element, outputs * element)[: 2 if bias else 1],
        remade=operand, between=operand, product=True,
    )  # fmt: skip


def enter(tape: Tape, place: Place, x: Value) -> Value:
    """Into a module that tensor ranks divide."""
    if place.tp == 1:
        return tape.view(x)
    if place.tensor == 1:
        return tape.op_view(x, place.gathered)
    # Gathered along the sequence: what arrives rank by rank is put in order by a copy.
    tape.hold_now("gathered sequences", place.gathered)
    found = tape.op(
        "gathered sequences", place.gathered, [(x, place.hidden)], temporary=(place.gathered,)
    )
    tape.let_go("gathered sequences", place.gathered)
    return found


def leave(tape: Tape, place: Place, x: Value) -> Value:
    """Out of it; takes over `x`."""
    if place.tp == 1:
        return x
    if place.tensor == 1:
        found = tape.op("hidden states", place.gathered, [(x, None)])
    else:
        tape.hold_now("gathered sequences", place.gathered)
        found = tape.op(
            "hidden states", place.hidden, [(x, place.gathered)], temporary=(place.gathered,)
        )
        tape.let_go("gathered sequences", place.gathered)
    tape.free(x)
    return found


def add(tape: Tape, place: Place, x: Value, y: Value) -> Value:
    """The sum of a residual and what a module says; keeps nothing but a dropout's mask."""
    if place.software.dropout:
        dropped = tape.op(
            "dropout", place.hidden, [(y, place.hidden)], extra=place.hidden // place.element,
            extra_name="dropout",
        )  # fmt: skip
        total = tape.op("hidden states", place.hidden, [(x, None), (dropped, None)])
        tape.free(dropped)
        return total
    return tape.op("hidden states", place.hidden, [(x, None), (y, None)])
