"""One stage of a pipeline (or the whole model) in one micro-batch: its blocks and ends put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fivefold.plan.memory.block import Bytes, Passage, Units, block
from fivefold.plan.memory.ends import embedding, head
from fivefold.plan.memory.moving import Placed, buckets
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.states import Gathering
from fivefold.plan.memory.tape import GATHERED, LEAVING, WEIGHTS, Weights


@dataclass(frozen=True)
class Span:
    """Layers of one stage; `sparse` of each. first, last: with the embedding, with the head.

    ropes: distinct rotary settings among them.
    """

    sparse: tuple[bool, ...]
    first: bool
    last: bool
    ropes: int = 1


@dataclass(frozen=True)
class Stage:
    """Bytes by component. kept: between forward and backward. forward, backward, for_input: the
    most in such an action, this micro-batch's own share of what is kept among it. aside: between
    `for_input` and the backward for the weights; `weight`: the largest gradient made in that."""

    kept: Bytes
    forward: Bytes
    backward: Bytes
    for_input: Bytes
    aside: Bytes
    weight: int


@lru_cache(maxsize=8192)
def stage(
    place: Place, span: Span, gathering: Gathering, split: bool = False, again: bool = True
) -> Stage:
    """`split`: the schedule has backwards in two. `again`: it is not the only micro-batch."""
    weights: Weights = "hold" if gathering.everything else "accumulate"
    whole = _passages(place, span, gathering, weights)
    base = _base(place, span)
    kept = base + together(whole, "kept")
    root, leaving = _root(place, span, gathering), _leaving(place, span, gathering)
    before = Counter({GATHERED: root, LEAVING: leaving[0] if again else 0})
    forward = before + _most(whole, base, lambda p: p.forward, 1, [0] * len(whole))
    backward = _backward(place, span, whole, base, root, leaving, again)
    if not split:
        return Stage(kept, forward, backward, Counter(), Counter(), 0)
    parts = _passages(place, span, gathering, "aside")
    for_input = _most_aside(parts, base)
    aside = together(parts, "aside")
    return Stage(kept, forward, backward, for_input, aside, max(p.weight for p in parts))


def together(passages: Iterable[Passage], part: Literal["kept", "aside"]) -> Bytes:
    """The sum of what passages keep; most of them are the same one."""
    numbers = Counter(map(id, passages))
    found: Bytes = Counter()
    for passage in {id(p): p for p in passages}.values():
        for name, size in getattr(passage, part).items():
            found[name] += size * numbers[id(passage)]
    return found


def _passages(place: Place, span: Span, gathering: Gathering, weights: Weights) -> list[Passage]:
    """Blocks, and the head behind them."""
    tp, ep, element = place.tp, place.ep, place.element
    sizes = {}
    for sparse in set(span.sparse):
        held = layer_weights(place.shape, sparse, tp, ep)
        sizes[sparse] = [gathering.bytes(held, expert, element) for expert in (False, True)]
    dense, expert = zip(*(sizes[sparse] for sparse in span.sparse), strict=True)
    alone = gathering.everything and gathering.expert_ranks == 1
    made: dict[tuple[bool, int, int], Passage] = {}  # most layers are alike
    found: list[Passage] = []
    for index, sparse in enumerate(span.sparse):
        before = dense[index - 1] if index else 0
        after = dense[index + 1] if index + 1 < len(dense) else 0
        key = sparse, before, after
        if key not in made:
            units = Units(dense[index], expert[index], before, after, alone)
            made[key] = block(place, sparse, weights, units)
        found.append(made[key])
    if span.last:
        found.append(head(place, weights, dense[-1]))
    return found


def _base(place: Place, span: Span) -> Bytes:
    """What a micro-batch keeps beside its blocks: rotary tables, and what the embedding keeps."""
    config = place.shape.config
    found: Bytes = Counter()
    if not place.shape.learned_positions:
        tables = span.ropes * config.rotary_dim * WIDE
        found["rotary tables"] = place.inside * tables
    if span.first:
        found += embedding(place).kept
    return found


def _ends(place: Place, span: Span) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Parameters before the first block, and behind the last; a tied table is before, if it can."""
    outer = outer_weights(place.shape, place.tp)
    tied = place.shape.config.tie_embeddings and not span.first
    table = outer["embedding"][:1] if tied else outer["head"]
    return outer["embedding"] if span.first else (), outer["norm"] + table if span.last else ()


def _root(place: Place, span: Span, gathering: Gathering) -> int:
    """Bytes of what is no block, which ZeRO-3 keeps gathered from forward to backward."""
    return gathering.bytes(sum(_ends(place, span), ()), False, place.element)


def _leaving(place: Place, span: Span, gathering: Gathering) -> list[int]:
    """ZeRO-2: bytes of a micro-batch's gradients, when all are made, when the embedding's are not,
    when those of the first block are not, … and when only the last end's are. A bucket exists from
    its first gradient on."""
    count = len(span.sparse)
    if not gathering.gradients:
        return [0] * (count + 2)
    first, last = _ends(place, span)
    order = [Placed(-1, weight) for weight in first]
    for index, sparse in enumerate(span.sparse):
        layer = layer_weights(place.shape, sparse, place.tp, place.ep)
        order += [Placed(index, weight) for weight in layer]
    order += [Placed(count, weight) for weight in last]
    found = [0] * (count + 2)
    for expert, ranks in ((False, gathering.ranks), (True, gathering.expert_ranks)):
        family = [placed for placed in order if placed.weight.expert is expert]
        for bucket in buckets(family, place.software.bucket) if ranks > 1 else ():
            size = WIDE * sum(placed.weight.shard(ranks) for placed in bucket)
            begun, ended = bucket[0].block, bucket[-1].block
            for after in range(count + 2):  # parts behind `after - 2` are through
                found[after] += size * (ranks * (begun > after - 2) + (ended > after - 2))
    return found


def _most(
    passages: list[Passage],
    base: Bytes,
    part: Callable[[Passage], Bytes],
    which: int,
    leaving: list[int],
) -> Bytes:
    """The most of any passage, with what those before it keep, and gradients on their way."""
    before, best, place = 0, -1, 0
    for index, passage in enumerate(passages):
        total = before + passage.totals[which] + leaving[index]
        if total > best:
            best, place = total, index
        before += passage.totals[0]
    found = base + part(passages[place]) + Counter({LEAVING: leaving[place]})
    return found + together(passages[:place], "kept")


def _backward(
    place: Place,
    span: Span,
    passages: list[Passage],
    base: Bytes,
    root: int,
    leaving: list[int],
    again: bool,
) -> Bytes:
    """The most of head, blocks and embedding."""
    blocks = passages[:-1] if span.last else passages
    head_table = place.words * place.shape.config.hidden_size * place.element
    # Until the root's backward is over; of a tied table, until its other gradient is there.
    tied = place.shape.config.tie_embeddings and span.first
    waits = Counter({WEIGHTS: head_table if span.last and (root or tied) else 0})
    found = [waits + _most(blocks, base, lambda p: p.backward, 2, leaving[2:])]
    if span.last:
        before = Counter({LEAVING: leaving[0] if again else 0})
        found.append(base + before + together(blocks, "kept") + passages[-1].backward)
    if span.first:
        found.append(base + embedding(place).backward + waits + Counter({LEAVING: leaving[1]}))
    if root:
        sent = Counter({LEAVING: root * WIDE // place.element, WEIGHTS: root})
        found.append(base + sent)
    most = max(found, key=lambda b: b.total())
    return most + Counter({GATHERED: root})


def _most_aside(parts: list[Passage], base: Bytes) -> Bytes:
    """The same where blocks that are through leave the operands of weights' gradients."""
    kept, left = sum(p.totals[0] for p in parts), 0
    best, place = -1, 0
    for index in reversed(range(len(parts))):
        kept -= parts[index].totals[0]
        if kept + left + parts[index].totals[2] > best:
            best, place = kept + left + parts[index].totals[2], index
        left += parts[index].aside.total()
    before, behind = together(parts[:place], "kept"), together(parts[place + 1 :], "aside")
    return base + before + behind + parts[place].backward
