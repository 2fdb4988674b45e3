"""The two ends of a model on a tape: the embedding, and the head with its loss."""

from __future__ import annotations

# N tokens inside a divided module, n between blocks, D hidden, V words here, C tokens of a chunk
from collections import Counter
from functools import lru_cache

from fivefold.plan.memory.block import Passage
from fivefold.plan.memory.pieces import enter, norm
from fivefold.plan.memory.place import INDEX, WIDE, Place
from fivefold.plan.memory.tape import GATHERED, GRADIENTS, WEIGHTS, Tape, Value, Weights


@lru_cache(maxsize=512)
def embedding(place: Place) -> Passage:
    """Tokens to hidden states, which belong to the first block."""
    width, words = place.shape.config.hidden_size, place.words
    table = words * width * place.element
    if place.tp == 1:
        forward = Counter({"hidden states": place.hidden})
        backward = Counter({GRADIENTS: place.hidden, WEIGHTS: table})
        return Passage(Counter(), forward, backward)
    # Rows that other ranks have give zeros; backward needs to know which.
    kept = Counter({"embedding": place.inside * (1 + INDEX)})
    forward = kept + Counter({"embedding": 2 * place.gathered})
    if place.tensor > 1:
        forward += Counter({"hidden states": place.hidden})
    backward = kept + Counter({GRADIENTS: place.hidden + 2 * place.gathered, WEIGHTS: table})
    return Passage(kept, forward, backward)


@lru_cache(maxsize=512)
def head(place: Place, weights: Weights, early: int = 0) -> Passage:
    """The last norm and the loss of what the last block gave.

    early: bytes of the last block: what ZeRO-3 gathered is there until forward is over, and what it
    gathers anew comes before backward does.
    """
    config = place.shape.config
    tape = Tape(weights)
    x = Value(tape.new("hidden states", place.hidden))
    tape.hold_now(GATHERED, early)
    tape.mark()
    normed = norm(tape, place, x, place.tokens, config.hidden_size)
    tape.drop(x.storage)
    whole = enter(tape, place, normed)
    loss = _loss(tape, place, whole, normed)
    tape.free(whole, normed)
    forward = tape.at_most
    tape.let_go(GATHERED, early)
    kept = +tape.live
    tape.free(loss)
    tape.hold_now(GATHERED, early)
    tape.mark()
    tape.backward(loss, tape.new(GRADIENTS, WIDE))
    return Passage(kept, forward, tape.at_most)


def _loss(tape: Tape, place: Place, hidden: Value, entered: Value) -> Value:
    """A number; its gradients are made in forward (fused), or from all logits in backward."""
    config, rows, element = place.shape.config, place.inside, place.element
    width, words = config.hidden_size, place.words
    matrix, table = rows * width * element, words * width * element
    if not place.software.fused_loss:
        return _whole_loss(tape, place, hidden, entered)
    logits = min(place.software.chunk, rows) * words * WIDE
    of_hidden = tape.new("logits", matrix)
    if element < WIDE:  # sums in fp32, rounded into where the logits were
        of_weight = tape.new("logits", max(table, logits))
        tape.passing("logits", words * width * WIDE)
    else:
        of_weight = tape.new("logits", table)
        tape.passing("logits", logits)
    loss = tape.op(
        "logits", WIDE, [(hidden, None)], saves=(of_hidden, of_weight), weights=(table,),
        prepared=True,
    )  # fmt: skip
    tape.drop(of_hidden, of_weight)
    return loss


def _whole_loss(tape: Tape, place: Place, hidden: Value, entered: Value) -> Value:
    """The head's input and all logits, in fp32 for the softmax."""
    config, rows, element = place.shape.config, place.inside, place.element
    matrix = rows * config.hidden_size * element
    kept = hidden if place.software.keeps_gathered or place.tensor == 1 else entered
    scores = rows * place.words
    raw = tape.op(
        "logits", scores * element, [(hidden, matrix)], saves=[kept.storage],
        weights=(place.words * config.hidden_size * element,),
    )  # fmt: skip
    wide = tape.op("logits", scores * WIDE, [(raw, scores * element)], saves_output=True)
    tape.free(raw)
    loss = tape.op("logits", WIDE, [(wide, scores * WIDE)])
    tape.free(wide)
    return loss
