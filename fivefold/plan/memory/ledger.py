"""The memory ledger: what each pipeline rank holds at its fullest moment, by component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from fivefold.core.layout import Layout
from fivefold.plan.memory.block import Bytes
from fivefold.plan.memory.depth import layers_of
from fivefold.plan.memory.flight import Flight, Moment, flights, stages_of
from fivefold.plan.memory.moving import publishing
from fivefold.plan.memory.parameters import Weight, layer_weights, outer_weights
from fivefold.plan.memory.place import INDEX, WIDE, Place
from fivefold.plan.memory.stage import Span, Stage, stage
from fivefold.plan.memory.states import Gathering, States, states
from fivefold.plan.memory.tape import GATHERED, LEAVING, WEIGHTS
from fivefold.plan.shape import ModelShape
from fivefold.plan.workload import Software, Strategy, Training

# Components that are no activations: they move, or are gathered, or are on their way to be added.
BUFFERS = (
    GATHERED, LEAVING, "messages", "key/value messages", WEIGHTS, "new parameters",
)  # fmt: skip
# What no ledger can count: the context and libraries' workspaces, NCCL's channels, fragments.
CONTEXT = 1 << 30
FRAGMENTS = 0.03


@dataclass(frozen=True)
class Ledger:
    """Bytes on the device of the first rank of a pipeline stage, at its fullest moment.

    parameters, masters, gradients, optimizer: held all the time. activations: by component;
    buffers: gathered parameters, messages, gradients on their way. reserve: context, workspaces and
    fragments (an estimate). host: in the host's memory. moment: the action in which it is fullest.
    """

    rank: int
    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: Mapping[str, int]
    buffers: Mapping[str, int]
    reserve: int
    host: int = 0
    moment: str = ""

    @property
    def states(self) -> int:
        """What is held all the time."""
        return self.parameters + self.masters + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """Activations and buffers at the fullest moment."""
        return sum(self.activations.values()) + sum(self.buffers.values())

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.working + self.reserve


def ledger(
    shape: ModelShape, training: Training, strategy: Strategy, software: Software
) -> tuple[Ledger, ...]:
    """One for each pipeline rank.

    Raises LayoutError for a layout whose stages do not add up; `axes.check` refuses the others.
    """
    layout = strategy.layout
    place = Place.of(shape, training, strategy, software)
    microbatches = max(1, strategy.microbatches(training))
    count = stages_of(layout.schedule, layout.pp, layout.virtual)
    layers = layers_of(shape, training.sequence, count, layout, software)
    spans = tuple(_span(place, part, index, count) for index, part in enumerate(layers))
    flying = flights(layout.schedule, layout.pp, microbatches, layout.virtual)
    fixed = _Fixed.of(place, training, layout)
    return tuple(
        _rank(place, fixed, rank, flight, tuple(spans[part] for part in flight.parts), microbatches)
        for rank, flight in enumerate(flying)
    )


@dataclass(frozen=True)
class _Fixed:
    """What the state of a rank follows from, beside its stages: no micro-batch among it."""

    shape: ModelShape
    software: Software
    optimizer: Literal["adamw", "sgd"]
    element: int
    tp: int
    ep: int
    gathering: Gathering
    offload: Literal["none", "optimizer", "parameters"]
    ring: bool  # stages around all ranks: the next message comes early
    ends_apart: bool
    twins: bool

    @classmethod
    def of(cls, place: Place, training: Training, layout: Layout) -> _Fixed:
        """Of a layout."""
        turning = layout.schedule in ("zbv", "dualpipe", "dualpipe-v")
        return cls(
            place.shape, place.software, training.optimizer, place.element, place.tp, place.ep,
            Gathering.of(layout), layout.offload,
            layout.schedule == "interleaved" and layout.pp > 1, layout.pp > 1 and not turning,
            layout.schedule == "dualpipe" and layout.pp > 1,
        )  # fmt: skip


def _rank(
    place: Place,
    fixed: _Fixed,
    rank: int,
    flight: Flight,
    spans: tuple[Span, ...],
    microbatches: int,
) -> Ledger:
    held = _states(fixed, spans)
    early = int(fixed.ring and rank > 0)
    most, moment = _fullest(place, fixed, flight, spans, early, microbatches > 1)
    activations = {n: b for n, b in most.items() if b and n not in BUFFERS}
    activations["inputs"] = 3 * INDEX * place.inside * microbatches
    buffers = {n: b for n, b in most.items() if b and n in BUFFERS}
    working = sum(activations.values()) + sum(buffers.values())
    reserve = CONTEXT + FRAGMENTS * working
    if place.ep > 1:  # load is even in what is counted; the busiest rank has more
        uneven = activations.get("dispatch", 0) + activations.get("experts", 0)
        reserve += (place.software.imbalance - 1) * uneven
    return Ledger(
        rank, held.parameters, held.masters, held.gradients, held.optimizer,
        activations, buffers, int(reserve), held.host, moment,
    )  # fmt: skip


def _span(place: Place, layers: range, part: int, count: int) -> Span:
    config = place.shape.config
    ropes = len({config.ropes[i] for i in layers})
    return Span(tuple(config.is_sparse(i) for i in layers), part == 0, part == count - 1, ropes)


@lru_cache(maxsize=16384)
def _states(fixed: _Fixed, spans: tuple[Span, ...]) -> States:
    return states(
        weights_of(fixed.shape, fixed.tp, fixed.ep, spans), fixed.gathering, fixed.software,
        fixed.element, fixed.optimizer, fixed.offload,
    )  # fmt: skip


def weights_of(shape: ModelShape, tp: int, ep: int, spans: tuple[Span, ...]) -> tuple[Weight, ...]:
    """All that a rank holds of parameters; a tied table once, though both ends use it."""
    outer = outer_weights(shape, tp)
    found: list[Weight] = []
    first, last = any(s.first for s in spans), any(s.last for s in spans)
    if first or (last and shape.config.tie_embeddings):
        found += outer["embedding"] if first else outer["embedding"][:1]
    for span in spans:
        for sparse in span.sparse:
            found += layer_weights(shape, sparse, tp, ep)
    if last:
        found += outer["norm"] + outer["head"]
    return tuple(found)


@lru_cache(maxsize=16384)
def _at_the_end(fixed: _Fixed, spans: tuple[Span, ...]) -> Bytes:
    """After the last backward: gradients of two ranks are joined, then parameters gathered by
    buckets; the larger of both."""
    gathering, new = fixed.gathering, 0
    if not gathering.everything:
        weights = weights_of(fixed.shape, fixed.tp, fixed.ep, spans)
        ranks = {False: gathering.ranks, True: gathering.expert_ranks}
        new = publishing(weights, ranks, fixed.software.bucket, fixed.element)
    ends = any(s.first for s in spans) != any(s.last for s in spans)
    joined: tuple[Weight, ...] = ()
    if fixed.twins:  # both ranks that hold a stage add up all of its gradients
        joined = weights_of(fixed.shape, fixed.tp, fixed.ep, spans)
    elif fixed.ends_apart and ends and fixed.shape.config.tie_embeddings:
        joined = outer_weights(fixed.shape, fixed.tp)["embedding"][:1]
    sums = WIDE * sum(map(gathering.shard, joined))
    return Counter({LEAVING: sums} if sums > new else {"new parameters": new})


@lru_cache(maxsize=65536)
def _fullest(
    place: Place,
    fixed: _Fixed,
    flight: Flight,
    spans: tuple[Span, ...],
    early: int,
    again: bool,
) -> tuple[Bytes, str]:
    """What lives at the fullest moment beside the state, and which moment that is."""
    split = {moment.stage for moment in flight.moments if moment.kind in "IW"}
    plain = replace(place, remakes=False)  # what is put aside is kept as it is
    stages = [
        stage(plain if index in split else place, span, fixed.gathering, bool(split), again)
        for index, span in enumerate(spans)
    ]
    # What comes is taken over by the action that waits for it.
    sizes = [_Sizes.of(s) for s in stages]
    moment = max(flight.moments, key=lambda m: _size(sizes, m) + m.sent * place.hidden)
    found = _bytes(stages, moment) + Counter({"messages": (moment.sent + early) * place.hidden})
    end = _at_the_end(fixed, spans)
    if end.total() > found.total():
        return end, "the end of the step"
    kinds = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "for the weights"}
    here = moment.kept[moment.stage] + (moment.kind == "F")
    return found, f"{kinds[moment.kind]}, {here} micro-batches under way"


@dataclass(frozen=True)
class _Sizes:
    kept: int
    aside: int
    actions: Mapping[str, int]

    @classmethod
    def of(cls, stage: Stage) -> _Sizes:
        """Totals, so that the fullest moment is found by numbers."""
        actions = {
            "F": stage.forward.total(),
            "B": stage.backward.total(),
            "I": stage.for_input.total(),
            "W": stage.aside.total() + stage.weight,
        }
        return cls(stage.kept.total(), stage.aside.total(), actions)


def _size(sizes: list[_Sizes], moment: Moment) -> int:
    found = sum(s.kept * n for s, n in zip(sizes, moment.kept, strict=True))
    found += sum(s.aside * n for s, n in zip(sizes, moment.aside, strict=True))
    own = sizes[moment.stage]
    if moment.kind in "BI":
        found -= own.kept
    elif moment.kind == "W":
        found -= own.aside
    return found + own.actions[moment.kind]


def _bytes(stages: list[Stage], moment: Moment) -> Bytes:
    kept, aside = list(moment.kept), list(moment.aside)
    own = stages[moment.stage]
    if moment.kind in "BI":
        kept[moment.stage] -= 1
    elif moment.kind == "W":
        aside[moment.stage] -= 1
    action = {
        "F": own.forward,
        "B": own.backward,
        "I": own.for_input,
        "W": own.aside + Counter({WEIGHTS: own.weight}),
    }[moment.kind]
    found: Bytes = Counter(action)
    for each, number, left in zip(stages, kept, aside, strict=True):
        for name, size in each.kept.items():
            found[name] += size * number
        for name, size in each.aside.items():
            found[name] += size * left
    return found
