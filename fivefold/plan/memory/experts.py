"""A mixture of experts on a tape: routing, rows to experts and back, under even load."""

from __future__ import annotations

# n tokens, D hidden, X experts, M = n K rows of K experts a token, F an expert's inner width
from fivefold.model.config import MoEConfig
from fivefold.plan.memory.feed_forward import feed_forward
from fivefold.plan.memory.place import INDEX, WIDE, Place
from fivefold.plan.memory.tape import Storage, Tape, Value


def mixture(tape: Tape, place: Place, x: Value, unit: int) -> Value:
    """Of normalised hidden states; `unit`: bytes of the experts' gathered weights (ZeRO-3)."""
    moe = place.shape.config.moe
    assert moe is not None, "a sparse layer has experts"
    routing = _route(tape, place, moe, x)
    routed = _dispatch(tape, place, moe, x, routing, unit)
    if not moe.shared_size:
        tape.free(*routing)
        return routed
    shared = feed_forward(tape, place, x, moe.shared_size, last=True)
    total = tape.op("experts", place.hidden, [(routed, None), (shared, None)])
    tape.free(routed, shared, *routing)
    return total


def _route(tape: Tape, place: Place, moe: MoEConfig, x: Value) -> list[Value]:
    """[logits, scores, choice, weight of the choices]: scores are fp32 whatever the format."""
    tokens, width = place.tokens, place.shape.config.hidden_size
    wide, matrix = tokens * width * WIDE, moe.experts * width * WIDE
    scores, chosen = tokens * moe.experts * WIDE, tokens * moe.top_k * WIDE
    if place.element < WIDE:
        operand = tape.op("router", wide, [(x, place.hidden)])
        copy = tape.new("router", matrix)
    else:
        operand, copy = tape.view(x), tape.new("router", 0)
    logits = tape.op(
        "router", scores, [(operand, wide)], saves=[operand.storage, copy],
        weights=(matrix,), product=True,
    )  # fmt: skip
    tape.drop(copy)
    tape.free(operand)
    if moe.score == "softmax":
        found = tape.op("router", scores, [(logits, scores)], saves_output=True)
    else:  # a softmax beside zeros
        pairs = tape.op("router", 2 * scores, [(logits, None)])
        found = tape.op("router", 2 * scores, [(pairs, 2 * scores)], saves_output=True)
        tape.free(pairs)
    tape.passing("router", scores, scores)
    choice = tape.op("router", tokens * moe.top_k * INDEX, [])
    weight = tape.op("router", chosen, [(found, scores)], saves=[choice.storage])
    if moe.normalise:
        normal = tape.op(
            "router", chosen, [(weight, chosen)], saves=[weight.storage], extra=tokens * WIDE
        )
        tape.free(weight)
        weight = normal
    scaled = tape.op("router", chosen, [(weight, chosen)])
    tape.free(weight)
    return [logits, found, choice, scaled]


def _dispatch(
    tape: Tape, place: Place, moe: MoEConfig, x: Value, routing: list[Value], unit: int
) -> Value:
    """Rows to the experts, through them, and back."""
    rows, width = place.tokens * moe.top_k, place.shape.config.hidden_size
    size = rows * width * place.element
    order = tape.new("dispatch", rows * INDEX)
    spread = tape.op("dispatch", size, [(x, place.hidden)], saves=[order], temporary=(size,))
    if place.ep == 1:
        answers = _experts(tape, place, moe, spread, rows, unit)
        tape.free(spread)
        found = _combine(tape, place, moe, answers, routing[3], order)
        tape.free(answers)
    else:
        arrived = tape.op("dispatch", size, [(spread, size)])
        tape.free(spread)
        places = [tape.new("dispatch", rows * INDEX) for _ in range(2)]
        together = tape.op(
            "dispatch", size, [(arrived, size)], saves=[places[0]], temporary=(size,)
        )
        answers = _experts(tape, place, moe, together, rows, unit)
        tape.free(together)
        apart = tape.op("dispatch", size, [(answers, size)], saves=[places[1]], temporary=(size,))
        back = tape.op("dispatch", size, [(apart, size)])
        tape.free(apart)
        found = _combine(tape, place, moe, back, routing[3], order)
        tape.free(back, answers, arrived)
        tape.drop(*places)
    tape.drop(order)
    return found


def _experts(tape: Tape, place: Place, moe: MoEConfig, x: Value, rows: int, unit: int) -> Value:
    """Gated feed-forwards over their own rows."""
    here, element = moe.experts // place.ep, place.element
    width, wide = place.shape.config.hidden_size, moe.expert_size
    matrix = here * width * wide * element
    inner, outer = rows * wide * element, rows * width * element
    gathered = tape.gather(x, unit)
    up = [
        tape.op(
            "experts", inner, [(gathered, outer)], saves=[gathered.storage],
            weights=(matrix,), product=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    active = tape.op("experts", inner, [(u, inner) for u in up], saves=[u.storage for u in up])
    tape.free(*up)
    found = tape.op(
        "experts", outer, [(active, inner)], saves=[active.storage],
        weights=(matrix,), product=True,
    )  # fmt: skip
    tape.free(active)
    result = tape.release(found, unit)
    tape.free(gathered)
    return result


def _combine(
    tape: Tape, place: Place, moe: MoEConfig, rows: Value, weight: Value, order: Storage
) -> Value:
    """Rows at their places, weighted in fp32 and summed."""
    count, width = place.tokens * moe.top_k, place.shape.config.hidden_size
    size, wide = count * width * place.element, count * width * WIDE
    tape.hold_now("dispatch", size)
    places = tape.op("dispatch", size, [(rows, size)], saves=[rows.storage, order])
    tape.let_go("dispatch", size)
    if place.element < WIDE:
        converted = tape.op("dispatch", wide, [(places, size)])
        tape.free(places)
        places = converted
    last = not moe.shared_size
    if last:
        tape.last()
    weighted = tape.op(
        "dispatch", wide, [(places, wide), (weight, count * WIDE)],
        saves=[places.storage, weight.storage], temporary=(wide,),
    )  # fmt: skip
    tape.free(places)
    summed = tape.op("dispatch", place.tokens * width * WIDE, [(weighted, None)])
    tape.free(weighted)
    if place.element == WIDE:
        return summed
    result = tape.op("experts", place.hidden, [(summed, place.tokens * width * WIDE)])
    tape.free(summed)
    return result
