"""One stage of a pipeline (or the whole model) in one micro-batch: its blocks and ends put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fivefold.core.layout import Layout
from fivefold.plan.memory.block import Bytes, Passage, Units, block
from fivefold.plan.memory.ends import embedding, head
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
    """What ZeRO-3 divides state by; `everything`: it does, else parameters are whole."""

    everything: bool
    ranks: int
    expert_ranks: int

    @classmethod
    def of(cls, layout: Layout) -> Gathering:
        """Of a layout."""
        return cls(is_sharded(layout), layout.shards, expert_shards(layout))

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
def stage(place: Place, span: Span, gathering: Gathering, split: bool) -> Stage:
    """`split`: the schedule has backwards in two."""
    weights: Weights = "hold" if gathering.everything else "accumulate"
    whole = _passages(place, span, gathering, weights)
    base = _base(place, span)
    kept = sum((p.kept for p in whole), base)
    root = _root(place, span, gathering)
    forward = _most(whole, base, lambda p: p.forward, 1) + Counter({"gathers": root})
    backward = _backward(place, span, gathering, weights, base, root)
    if not split:
        return Stage(kept, forward, backward, Counter(), Counter(), 0)
    parts = _passages(place, span, gathering, "aside")
    for_input = _most_aside(parts, base)
    aside = sum((p.aside for p in parts), Counter())
    return Stage(kept, forward, backward, for_input, aside, max(p.weight for p in parts))


def _passages(
    place: Place, span: Span, gathering: Gathering, weights: Weights
) -> list[Passage]:
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


def _root(place: Place, span: Span, gathering: Gathering) -> int:
    """Bytes of what is no block, which stays gathered from forward to backward."""
    outer = outer_weights(place.shape, place.tp)
    found = 0
    if span.first:
        found += gathering.bytes(outer["embedding"], False, place.element)
    if span.last:
        found += gathering.bytes(outer["norm"], False, place.element)
        tied = place.shape.config.tie_embeddings and not span.first
        table = outer["embedding"][:1] if tied else outer["head"]
        found += gathering.bytes(table, False, place.element)
    return found


def _most(
    passages: list[Passage], base: Bytes, part: Callable[[Passage], Bytes], which: int
) -> Bytes:
    """The most of any passage, with what those before it keep."""
    before, best, place = 0, -1, 0
    for index, passage in enumerate(passages):
        total = before + passage.totals[which]
        if total > best:
            best, place = total, index
        before += passage.totals[0]
    return sum((p.kept for p in passages[:place]), base + part(passages[place]))


def _backward(
    place: Place, span: Span, gathering: Gathering, weights: Weights, base: Bytes, root: int
) -> Bytes:
    """The most of head, blocks and embedding."""
    passages = _passages(place, span, gathering, weights)
    blocks = passages[:-1] if span.last else passages
    found = [_most(blocks, base, lambda p: p.backward, 2)]
    head_table = place.words * place.shape.config.hidden_size * place.element
    waits = Counter({"gradients of weights": head_table if root and span.last else 0})
    found[0] = found[0] + waits
    if span.last:
        kept = sum((p.kept for p in blocks), base)
        found.append(kept + passages[-1].backward)
    if span.first:
        found.append(base + embedding(place).backward + waits)
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
