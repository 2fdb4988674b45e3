"""The best strategies of a job, by bounds: what cannot be among them is never judged.

A node is a set of choices (see `space`), the cheapest bound comes first. Its parts are looked at unless
a bound says that none of them can be among the best `wanted` shapes, nor on the front of time and
memory, by more than `CLOSE`. That holds over all strategies of the space, not over a sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from fivefold.plan.search.bound import Bounds
from fivefold.plan.search.found import Found
from fivefold.plan.search.front import front
from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.space import (
    RECOMPUTE,
    Pipe,
    Split,
    Width,
    depths,
    micro_batches,
    pipes,
    splits,
    strategy,
    widths,
)
from fivefold.plan.workload import Recompute

SLOWEST = 1.3  # of the best time: the front goes no further
CLOSE = 0.01  # of a time: what is no further from a bound need not be beaten
MOST_JUDGED = 1500  # strategies for the front's sake, which is then followed no further
FINER = 0.03  # of a device's memory: a difference that the front need not show

Shape = tuple[int, int, int, int]  # tp, cp, ep, pp; the rest are data ranks


@dataclass
class Counts:
    """What a search did."""

    shapes: int = 0
    bounded: int = 0
    judged: int = 0
    too_large: int = 0


@dataclass
class Result:
    """`best`: of each shape, fastest first; `front`: of time and memory."""

    best: list[Found] = field(default_factory=list)
    front: list[Found] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True)
class _Node:
    width: Width
    pp: int
    micro_batch: int | None = None
    recompute: Recompute | None = None
    pipe: Pipe | None = None

    @property
    def shape(self) -> Shape:
        return self.width.tp, self.width.cp, self.width.ep, self.pp


class Search:
    """One search; `wanted` shapes are ranked, and the front is followed where `with_front`."""

    def __init__(
        self,
        job: Job,
        estimators: Estimators,
        *,
        wanted: int = 8,
        with_front: bool = True,
        budget: int | None = None,
        margin: float = 0.0,
    ) -> None:
        self.job = job
        self.estimators = estimators
        self.bounds = Bounds(job, estimators)
        self.wanted = wanted
        self.with_front = with_front
        self.budget = budget
        self.counts = Counts()
        self.by_shape: dict[Shape, Found] = {}
        self.found: list[Found] = []
        self._first: int | None = None  # strategies judged when one was found that fits
        self._times: list[float] = []  # of the shapes' best
        self._front: list[tuple[float, float]] = []  # seconds and bytes that none has both below
        self._memory = job.cluster.device.memory * (1 - margin)
        self._order = count()
        self._heap: list[tuple[float, int, _Node]] = []

    def run(self) -> Result:
        """Raises what the estimators raise."""
        for width in widths(self.job):
            for pp in depths(self.job, width):
                self._start(width, pp)
        while self._heap:
            floor, _, node = heapq.heappop(self._heap)
            if floor > self._horizon() or self._is_spent():
                break
            if self._may_matter(floor, node):
                self._open(node)
        best = sorted(self.by_shape.values(), key=lambda each: each.seconds)
        line = front(self.found, lambda each: (each.seconds, each.bytes))
        slowest = SLOWEST * best[0].seconds if best else 0.0
        kept = [each for each in line if each.seconds <= slowest]
        return Result(best[: self.wanted], kept, self.counts)

    def _is_spent(self) -> bool:
        """Whether `budget` strategies were judged since the first that fits, or three times it without one."""
        if self.budget is None:
            return False
        if self._first is None:
            return self.counts.judged >= 3 * self.budget
        return self.counts.judged >= self._first + self.budget

    def _start(self, width: Width, pp: int) -> None:
        """Put a shape on the heap, unless its state alone is too large."""
        self.counts.shapes += 1
        fitting = [
            batch
            for batch in micro_batches(self.job, width, pp)
            if self.bounds.bytes(width, pp, batch, "full") <= self._memory
        ]
        if fitting:
            # Larger passes are no slower for each token.
            floor = self.bounds.seconds(width, pp, fitting[-1], "none", None)
            self._push(floor, _Node(width, pp))

    def _push(self, floor: float, node: _Node) -> None:
        self.counts.bounded += 1
        heapq.heappush(self._heap, (floor, next(self._order), node))

    def _ranked(self) -> float:
        """The time that a new shape must be below to be among those wanted."""
        return self._times[self.wanted - 1] if len(self._times) >= self.wanted else float("inf")

    def _horizon(self) -> float:
        """The time beyond which nothing matters."""
        ranked = self._ranked()
        if not self._follows() or not self.found:
            return ranked
        return max(ranked, SLOWEST * self._front[0][0])

    def _may_matter(self, floor: float, node: _Node, split: Split | None = None) -> bool:
        """Whether something of `node` that takes `floor` or more may be wanted, and may fit."""
        if floor > self._horizon():
            return False
        micro_batch, recompute = node.micro_batch or 1, node.recompute or "full"
        least = self.bounds.bytes(node.width, node.pp, micro_batch, recompute, node.pipe, split)
        if least > self._memory:
            return False
        here = self.by_shape.get(node.shape)
        best = float("inf") if here is None else here.seconds
        if floor * (1 + CLOSE) < min(self._ranked(), best):
            return True
        if not self._follows():
            return False
        time, size = floor * (1 + CLOSE), least + FINER * self._memory
        return not any(seconds <= time and held <= size for seconds, held in self._front)

    def _follows(self) -> bool:
        """Whether the front is still followed."""
        return self.with_front and self.counts.judged < MOST_JUDGED

    def _open(self, node: _Node) -> None:
        if node.pipe is not None:
            self._judge(node)
        for floor, child in self._parts(node):
            self._push(floor, child)

    def _parts(self, node: _Node) -> Iterator[tuple[float, _Node]]:
        width, pp = node.width, node.pp
        if node.micro_batch is None:
            for batch in micro_batches(self.job, width, pp):
                for mode in RECOMPUTE:
                    if self.bounds.bytes(width, pp, batch, mode) <= self._memory:
                        floor = self.bounds.seconds(width, pp, batch, mode, None)
                        yield floor, _Node(width, pp, batch, mode)
        elif node.pipe is None:
            assert node.recompute is not None
            dp = self.job.devices // (width.ranks * pp)
            microbatches = self.job.training.global_batch // (dp * node.micro_batch)
            for pipe in pipes(self.job, pp, microbatches):
                floor = self.bounds.seconds(width, pp, node.micro_batch, node.recompute, pipe)
                yield floor, _Node(width, pp, node.micro_batch, node.recompute, pipe)

    def _judge(self, node: _Node) -> None:
        """All that data ranks may divide, of one node."""
        width, pp, pipe = node.width, node.pp, node.pipe
        batch, mode = node.micro_batch, node.recompute
        assert pipe is not None and batch is not None and mode is not None
        job = self.job
        least = 0.0  # what a step takes whatever data ranks divide
        once = batch * job.devices // (width.ranks * pp) == job.training.global_batch
        for split in splits(job, width, pp, pipe):
            # ZeRO-2 sends gradients for each micro-batch, which the time of a step does not know.
            if (split.zero == 2 and not once) or not self._may_matter(least, node, split):
                continue
            chosen = strategy(width, pp, pipe, split, batch, mode)
            self.counts.judged += 1
            time = self.estimators.step_time(
                job.shape, job.training, chosen, job.cluster, job.software
            )  # fmt: skip
            if split.zero == 1:
                least = time.total - time.exposed.get("dp", 0.0) - time.optimizer
            if not self._may_matter(time.total, node, split):
                continue
            memory = self.estimators.ledger(job.shape, job.training, chosen, job.software)
            if max(each.total for each in memory) <= self._memory:
                self._keep(node.shape, Found(job, chosen, memory, time))
            else:
                self.counts.too_large += 1

    def _keep(self, shape: Shape, one: Found) -> None:
        self.found.append(one)
        self._first = self.counts.judged if self._first is None else self._first
        point = one.seconds, one.bytes
        if not any(a <= point[0] and b <= point[1] for a, b in self._front):
            rest = [(a, b) for a, b in self._front if a < point[0] or b < point[1]]
            self._front = sorted([*rest, point])
        if shape not in self.by_shape or one.seconds < self.by_shape[shape].seconds:
            self.by_shape[shape] = one
            self._times = sorted(each.seconds for each in self.by_shape.values())


def search(
    job: Job,
    estimators: Estimators,
    *,
    wanted: int = 8,
    with_front: bool = True,
    budget: int | None = None,
    margin: float = 0.0,
) -> Result:
    """The best strategies of `job`, and its front of time and memory.

    budget: strategies that are judged after the first that fits; the best of these need not be the best.
    margin: share of a device's memory that must stay free.
    """
    found = Search(
        job, estimators, wanted=wanted, with_front=with_front, budget=budget, margin=margin
    )
    return found.run()
