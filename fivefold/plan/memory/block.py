"""One block on a tape: what it keeps for backward, and the most that lives beside it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from fivefold.plan.memory.attention import attention
from fivefold.plan.memory.experts import mixture
from fivefold.plan.memory.feed_forward import feed_forward
from fivefold.plan.memory.pieces import add, norm
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.tape import GATHERED, GRADIENTS, LEAVING, Tape, Value, Weights

Bytes = Counter[str]


@dataclass(frozen=True)
class Units:
    """Bytes that ZeRO-3 gathers for a block and for its experts.

    before: of the unit that backward comes to next, which is gathered early. after: of the one
    that it came from, whose gradients are on their way. alone: the experts are on one rank each.
    """

    block: int = 0
    experts: int = 0
    before: int = 0
    after: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Passage:
    """Memory of a part of a stage in one micro-batch, by component.

    kept: from its forward until its backward, its input among it. forward: the most while it
    runs, its input among it. backward: the most, what is kept among it. aside: what a backward for
    the input leaves to that for the weights; `weight`: the largest gradient of these.
    """

    kept: Bytes = field(default_factory=Counter)
    forward: Bytes = field(default_factory=Counter)
    backward: Bytes = field(default_factory=Counter)
    aside: Bytes = field(default_factory=Counter)
    weight: int = 0

    @cached_property
    def totals(self) -> tuple[int, int, int]:
        """Bytes kept, in forward, in backward."""
        return self.kept.total(), self.forward.total(), self.backward.total()


@lru_cache(maxsize=4096)
def block(place: Place, sparse: bool, weights: Weights, units: Units = Units()) -> Passage:
    """A layer, dense or `sparse`."""
    tape = Tape(weights)
    tape.wire = WIDE / place.element
    again = is_checkpointed(place)
    x = Value(tape.new("checkpoints" if again else "hidden states", place.hidden))
    if units.block:
        tape.arrive(units.block)
        tape.alone, tape.before = units.alone, units.before
    if again:
        tape.grad = False
        tape.products = deque() if place.recompute == "selective" else None
    tape.mark()
    out = _body(tape, place, x, sparse, units.experts)
    forward = tape.at_most
    tape.free(out)
    if not again:
        tape.drop(x.storage)
    tape.depart(units.block)
    kept = +tape.live
    _backward(tape, place, x, out, sparse, units, again)
    aside: Bytes = Counter()
    for storage in {id(s): s for s in tape.aside}.values():
        aside["put aside"] += storage.bytes
    return Passage(kept, forward, tape.at_most, aside, tape.largest_weight)


def is_checkpointed(place: Place) -> bool:
    """Whether a block's forward runs again in backward."""
    products = place.software.selective == "products"
    return place.recompute == "full" or (place.recompute == "selective" and products)


def _backward(
    tape: Tape, place: Place, x: Value, out: Value, sparse: bool, units: Units, again: bool
) -> None:
    gradient = tape.new(GRADIENTS, place.hidden)
    if units.block:
        tape.hold_now(GATHERED, units.block + (0 if units.experts else units.before))
        if units.experts and not units.alone:
            tape.gathering = tape.new(GATHERED, units.experts)
        tape.scattering = tape.new(LEAVING, int(units.after * tape.wire))
    tape.mark()
    if again:
        tape.grad = tape.replaying = True
        waiting = (
            place.gathered if place.tensor > 1 else 0
        )  # what leaves a divided module, gathered
        tape.hold_now(GRADIENTS, waiting)
        out = _body(tape, place, x, sparse, units.experts)
        tape.stopped = False
        tape.let_go(GRADIENTS, waiting)
        tape.free(out)
    tape.backward(out, gradient)
    if units.block:
        tape.scatter(units.block)


def _body(tape: Tape, place: Place, x: Value, sparse: bool, experts: int) -> Value:
    """As `model.decoder.Block` computes."""
    config, width = place.shape.config, place.shape.config.hidden_size
    normed = norm(tape, place, x, place.tokens, width)
    attended = attention(tape, place, normed)
    tape.free(normed)
    middle = _residual(tape, place, x, attended)
    normed = norm(tape, place, middle, place.tokens, width)
    last = not config.post_norms  # else that norm keeps its input
    if sparse:
        fed = mixture(tape, place, normed, experts)
    else:
        fed = feed_forward(tape, place, normed, config.intermediate_size, last=last)
    tape.free(normed)
    out = _residual(tape, place, middle, fed, last=True)
    tape.free(fed, attended, middle)
    return out


def _residual(tape: Tape, place: Place, x: Value, y: Value, *, last: bool = False) -> Value:
    if not place.shape.config.post_norms:
        return add(tape, place, x, y)
    normed = norm(tape, place, y, place.tokens, place.shape.config.hidden_size)
    if last:
        tape.last()
    found = add(tape, place, x, normed)
    tape.free(normed)
    return found
