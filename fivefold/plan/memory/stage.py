"""One stage of a pipeline (or the whole model) in one micro-batch: its blocks and ends put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fivefold.core.layout import Layout
from fivefold.plan.memory.block import Bytes, Passage, Units, block
from fivefold.plan.memory.ends import embedding, head
from fivefold.plan.memory.moving import buckets
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.memory.place import WIDE, Place
from fivefold.plan.memory.states import expert_shards, is_sharded
from fivefold.plan.memory.tape import Weights


@dataclass(frozen=True)
class Span:
    """Layers of one stage; `sparse` of each. first, last: with the embedding, with the head."""

    sparse: tuple[bool, ...]
    first: bool
    last: bool


@dataclass(frozen=True)
class Gathering:
    """How many ranks divide state. everything: parameters too (ZeRO-3); gradients: those (ZeRO-2)."""

    everything: bool
    ranks: int
    expert_ranks: int
    gradients: bool = False

    @classmethod
    def of(cls, layout: Layout) -> Gathering:
        """Of a layout."""
        everything = is_sharded(layout)
        gradients = not everything and layout.zero == 2 and layout.shards > 1
        return cls(everything, layout.shards, expert_shards(layout), gradients)

    def bytes(self, weights: tuple[Weight, ...], expert: bool, element: int) -> int:
        """Of a unit once it is gathered, padded rows among them."""
        ranks = self.expert_ranks if expert else self.ranks
        if not self.everything:
            return 0
        return element * sum(w.shard(ranks) * ranks for w in weights if w.expert is expert)


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
    kept = sum((p.kept for p in whole), base)
    root, leaving = _root(place, span, gathering), _leaving(place, span, gathering)
    before = Counter({"gathers": root, "reduce": leaving[0] if again else 0})
    forward = before + _most(whole, base, lambda p: p.forward, 1, [0] * len(whole))
    backward = _backward(place, span, whole, base, root, leaving, again)
    if not split:
        return Stage(kept, forward, backward, Counter(), Counter(), 0)
    parts = _passages(place, span, gathering, "aside")
    for_input = _most_aside(parts, base)
    aside = sum((p.aside for p in parts), Counter())
    return Stage(kept, forward, backward, for_input, aside, max(p.weight for p in parts))


def _passages(place: Place, span: Span, gathering: Gathering, weights: Weights) -> list[Passage]:
    """Blocks, and the head behind them."""
    tp, ep, element = place.tp, place.ep, place.element
    dense, expert = [], []
    for sparse in span.sparse:
        held = layer_weights(place.shape, sparse, tp, ep)
        dense.append(gathering.bytes(held, False, element))
        expert.append(gathering.bytes(held, True, element))
    found = []
    for index, sparse in enumerate(span.sparse):
        units = Units(
            dense[index],
            expert[index],
            dense[index - 1] if index else 0,
            dense[index + 1] if index + 1 < len(dense) else 0,
            gathering.expert_ranks == 1,
        )
        found.append(block(place, sparse, weights, units))
    if span.last:
        found.append(head(place, weights, dense[-1]))
    return found


def _base(place: Place, span: Span) -> Bytes:
    """What a micro-batch keeps beside its blocks: rotary tables, and what the embedding keeps."""
    config = place.shape.config
    found: Bytes = Counter()
    if not place.shape.learned_positions:
        tables = len(set(config.ropes)) * config.rotary_dim * WIDE
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
    """ZeRO-2: bytes of a micro-batch's gradients, when all are made, when those of the first block
    are not, … and when only the ends' are. A bucket exists from its first gradient on."""
    count = len(span.sparse)
    if not gathering.gradients:
        return [0] * (count + 1)
    first, last = _ends(place, span)
    order = [(-1, weight) for weight in first]
    for index, sparse in enumerate(span.sparse):
        order += [(index, w) for w in layer_weights(place.shape, sparse, place.tp, place.ep)]
    order += [(count, weight) for weight in last]
    found = [0] * (count + 1)
    for expert, ranks in ((False, gathering.ranks), (True, gathering.expert_ranks)):
        family = [(index, weight) for index, weight in order if weight.expert is expert]
        for bucket in buckets(family, place.software.bucket) if ranks > 1 else ():
            size = WIDE * sum(weight.shard(ranks) for _, weight in bucket)
            begun, ended = bucket[0][0], bucket[-1][0]
            for at in range(count + 1):  # blocks from `at` on are through
                found[at] += size * (ranks * (begun >= at) + (ended >= at))
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
    found = base + part(passages[place]) + Counter({"reduce": leaving[place]})
    return sum((p.kept for p in passages[:place]), found)


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
    waits = Counter({"gradients of weights": head_table if root and span.last else 0})
    found = [waits + _most(blocks, base, lambda p: p.backward, 2, leaving[1:])]
    if span.last:
        before = Counter({"reduce": leaving[0] if again else 0})
        kept = sum((p.kept for p in blocks), base + before)
        found.append(kept + passages[-1].backward)
    if span.first:
        found.append(base + embedding(place).backward + waits + Counter({"reduce": leaving[0]}))
    if root:
        sent = Counter({"reduce": root * WIDE // place.element, "gradients of weights": root})
        found.append(base + sent)
    most = max(found, key=lambda b: b.total())
    return most + Counter({"gathers": root})


def _most_aside(parts: list[Passage], base: Bytes) -> Bytes:
    """The same where blocks that are through leave the operands of weights' gradients."""
    left: Bytes = Counter()
    kept = sum((p.kept for p in parts), base)
    most: Bytes = Counter()
    for passage in reversed(parts):
        kept = kept - passage.kept
        now = kept + left + passage.backward
        if now.total() > most.total():
            most = now
        left = left + passage.aside
    return most
