"""Every strategy of a job, in four steps from the outside in, each a set of choices.

What is left out is never better than something that is in: `gpipe` (1F1B has its bubble and less
memory), tensor ranks without sequence parallelism (the same traffic, more memory) where the sequence
divides, context ranks that could be data ranks (the same tokens a rank, without the ring: where
`cp` and the micro-batch have a common factor), copies of what could be divided (ZeRO-1 sends as
much as an all-reduce, for less memory), offloading (slower; tried where nothing fits), other orders of the axes and other sizes of
`dp_shard` than those here (tried around the best, see `refine`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

from fivefold.axes.check import check_model
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig
from fivefold.plan.search.job import Job
from fivefold.plan.search.valid import divides_states, divisors, rows_suffice, takes
from fivefold.plan.workload import Recompute, Strategy

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
MOST_STAGES = 8  # of one rank: more only send more
FEWEST_TOKENS = 512  # of a sequence on a context rank: with fewer its products are of half tiles
MOST_DOMAINS = 2  # that tensor ranks spread over: one more costs the same link again


@dataclass(frozen=True)
class Width:
    """What a layer's own products, memory and messages depend on, beside the micro-batch."""

    tp: int
    cp: int
    ulysses: int
    cp_kind: Literal["ring", "gather"]
    ep: int
    sequence_parallel: bool

    @property
    def ranks(self) -> int:
        """That share one sequence."""
        return self.tp * self.cp

    def layout(self, dp_shard: int = 1) -> Layout:
        """With `dp_shard` data ranks and no pipeline."""
        return Layout(
            tp=self.tp, cp=self.cp, ulysses=self.ulysses, cp_kind=self.cp_kind, ep=self.ep,
            sequence_parallel=self.sequence_parallel, dp_shard=dp_shard, zero=1,
        )  # fmt: skip


@dataclass(frozen=True)
class Pipe:
    """An order of micro-batches, and the stages of a rank."""

    schedule: str
    virtual: int = 1

    def stages(self) -> int:
        """Stages of one rank."""
        return 2 if self.schedule in ("zbv", "dualpipe-v") else self.virtual


@dataclass(frozen=True)
class Split:
    """What the data ranks divide."""

    dp_replicate: int
    dp_shard: int
    zero: Literal[1, 2, 3]


def widths(job: Job) -> Iterator[Width]:
    """All ways to cut layers and sequences over the job's devices."""
    config, sequence = job.shape.config, job.training.sequence
    moe = config.moe
    for tp in _tensor(job):
        whole = sequence % tp == 0
        for cp in divisors(job.devices // tp):
            if cp > 1 and sequence < cp * FEWEST_TOKENS:
                continue
            for ulysses, kind in _context(config, tp, cp):
                ways = divisors(moe.experts) if moe is not None else (1,)
                for ep in ways:
                    shard = max(1, ep // (tp * cp))
                    if shard * tp * cp % ep or shard * tp * cp > job.devices:
                        continue
                    parallel = whole or cp > 1
                    width = Width(tp, cp, ulysses, kind, ep, parallel)
                    if accepted(config, width, sequence):
                        yield width


def depths(job: Job, width: Width) -> Iterator[int]:
    """Pipeline ranks."""
    for pp in divisors(job.devices // width.ranks):
        if pp <= job.shape.config.num_layers:
            yield pp


def micro_batches(job: Job, width: Width, pp: int) -> Iterator[int]:
    """Sequences of a pass, smallest first."""
    dp = job.devices // (width.ranks * pp)
    if job.training.global_batch % dp == 0:
        for size in divisors(job.training.global_batch // dp):
            if math.gcd(size, width.cp) == 1:
                yield size


def pipes(job: Job, pp: int, microbatches: int) -> Iterator[Pipe]:
    """Schedules that take so many micro-batches, and their stages a rank."""
    if pp == 1:
        yield Pipe("1f1b")
        return
    layers = job.shape.config.num_layers
    for name in ("1f1b", "zb-h1", "zbv", "dualpipe", "dualpipe-v"):
        pipe = Pipe(name)
        if takes(name, pp, microbatches) and pp * pipe.stages() <= layers:
            yield pipe
    if takes("interleaved", pp, microbatches):
        for virtual in range(2, min(MOST_STAGES, layers // pp) + 1):
            if virtual == layers // pp or layers % (pp * virtual) == 0 or virtual in (2, 4, 8):
                yield Pipe("interleaved", virtual)


def splits(job: Job, width: Width, pp: int, pipe: Pipe) -> Iterator[Split]:
    """What data ranks divide: all among all, or parameters inside a domain of fast links (HSDP)."""
    dp = job.devices // (width.ranks * pp)
    yield from of_shards(job, width, pp, pipe, dp)
    inside = max(1, job.cluster.domain // width.ranks)
    fitting = max(n for n in divisors(dp) if n <= inside)
    if fitting < dp:
        for split in of_shards(job, width, pp, pipe, fitting):
            if split.zero == 3:
                yield split


def of_shards(job: Job, width: Width, pp: int, pipe: Pipe, shard: int) -> Iterator[Split]:
    """The ZeRO stages that `shard` data ranks may have."""
    dp = job.devices // (width.ranks * pp)
    if shard * width.ranks % width.ep:
        return
    zeros: tuple[Literal[1, 2, 3], ...] = (1, 2, 3) if shard * width.cp > 1 else (1,)
    for zero in zeros:
        split = Split(dp // shard, shard, zero)
        layout = compose(width, pp, pipe, split)
        if divides_states(layout, zero) and rows_suffice(job, layout):
            yield split


def compose(width: Width, pp: int, pipe: Pipe, split: Split) -> Layout:
    """All choices as a layout. Values are known to be good: nothing is checked again."""
    layout = _plain(width, pp, pipe)
    chosen = {"dp_replicate": split.dp_replicate, "dp_shard": split.dp_shard, "zero": split.zero}
    return layout.model_copy(update=chosen)


def strategy(
    width: Width, pp: int, pipe: Pipe, split: Split, micro_batch: int, recompute: Recompute
) -> Strategy:
    """All choices."""
    return Strategy(compose(width, pp, pipe, split), micro_batch, recompute)


@lru_cache(maxsize=65536)
def _plain(width: Width, pp: int, pipe: Pipe) -> Layout:
    update = {"pp": pp, "schedule": pipe.schedule, "virtual": pipe.virtual}
    return width.layout().model_copy(update=update)


@lru_cache(maxsize=65536)
def accepted(config: ModelConfig, width: Width, sequence: int) -> bool:
    """Whether the model can be cut so."""
    layout = width.layout(max(1, width.ep // width.ranks))
    try:
        check_model(layout, config, sequence)
    except LayoutError:
        return False
    return True


def _tensor(job: Job) -> Iterator[int]:
    for tp in divisors(job.devices):
        if tp <= MOST_DOMAINS * job.cluster.domain and tp <= job.shape.config.num_heads:
            yield tp


def _context(
    config: ModelConfig, tp: int, cp: int
) -> Iterator[tuple[int, Literal["ring", "gather"]]]:
    """Ways inside `cp` that divide heads, and how the others share keys and values."""
    if cp == 1:
        yield 1, "ring"
        return
    heads = max(1, config.num_heads // tp)
    for ulysses in divisors(cp):
        if heads % ulysses == 0:
            for kind in ("ring", "gather"):
                if kind == "ring" or ulysses < cp:
                    yield ulysses, cast(Literal["ring", "gather"], kind)
