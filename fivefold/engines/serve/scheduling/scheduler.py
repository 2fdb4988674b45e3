"""Continuous batching: what each step computes (Yu et al. 2022; Agrawal et al. 2024).

All sequences stand in one order that never changes: by priority class, where `aging` steps of
waiting are worth one class, then by arrival. A step goes through the running sequences in that
order and gives each its blocks; one that finds none takes them from the *last* in order, which is
put back and computed again later (preemption by recomputation). Every running sequence that is
past its prompt gets its token; what is left of `token_budget` goes to prompts, in chunks. Then new
sequences start while places, budget and blocks last, strictly in order.

A sequence whose next block is being computed by another in this very step waits for the next step
and finds it in the prefix index: sixteen requests with one long system prompt compute it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fivefold.engines.serve.scheduling.admission import Turnover, check, check_settings
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.draft import Draft
from fivefold.engines.serve.scheduling.errors import SchedulingError
from fivefold.engines.serve.scheduling.lines import Lines
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.sequence import FinishReason, Sequence


class Scheduler:
    """Sequences in, plans out. `schedule`, compute the plan, `update`; and again.

    `max_sequences` run at once, a step computes `token_budget` tokens at most (at least one for
    each that runs), `queue_limit` may wait. `draft` is the policy of a step: a planner simulates
    those of other systems. Raises SchedulingError for settings that cannot work.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prefix: PrefixIndex,
        *,
        max_sequences: int = 64,
        token_budget: int = 2048,
        queue_limit: int = 1024,
        aging: int = 512,
        clock: Callable[[], float] = time.monotonic,
        draft: type[Draft] = Draft,
    ) -> None:
        check_settings(max_sequences, token_budget, queue_limit, aging)
        if prefix.blocks is not blocks:
            raise SchedulingError("the prefix index is of other blocks", "build it of these")
        self.blocks = blocks
        self.prefix = prefix
        self.max_sequences = max_sequences
        self.token_budget = token_budget
        self.queue_limit = queue_limit
        self.aging = aging
        self.draft = draft
        self.steps = 0
        self.preemptions = 0
        self._arrivals = 0
        self._live: dict[int, Sequence] = {}
        self._lines = Lines(blocks)
        self._open: StepPlan | None = None
        self._leaving: list[Sequence] = []  # ended while the open plan was being computed
        self._turnover = Turnover(clock)

    @property
    def has_work(self) -> bool:
        """Whether a sequence has not ended."""
        return bool(self._live)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with blocks, in order."""
        return tuple(self._lines.running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks, those put back included, in order."""
        return tuple(self._lines.waiting)

    def get(self, id: int) -> Sequence | None:
        """The sequence, unless it has ended."""
        return self._live.get(id)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; allowed while a plan is open.

        Raises QueueFullError, PromptError for one that the cache could never hold, and
        SchedulingError for a record that is not new.
        """
        self._check_new(sequence)
        waiting = len(self._lines.waiting)
        if waiting >= self.queue_limit:
            raise self._turnover.refusal(waiting)
        self._enter(sequence)
        self._lines.wait(sequence)

    def fork(self, parent_id: int, child: Sequence) -> None:
        """Add a sequence that begins with all computed tokens of another, sharing its blocks.

        It runs at once when the parent runs and a place is free, and else waits like any other
        (the queue's limit aside). Raises as `add` does, SchedulingError also when the tokens or
        the salts differ, or while a plan is open.
        """
        self._require_closed("fork")
        self._check_new(child)
        parent = self._live.get(parent_id)
        full = len(self._lines.running) >= self.max_sequences
        if parent is None or parent.state != "running" or full:
            self._enter(child)
            self._lines.wait(child)
            return
        _check_fork(parent, child)
        self._enter(child)
        shared = parent.computed
        child.keys = parent.keys[: shared // self.blocks.block_size]
        child.block_table = self.blocks.fork(parent.block_table[: self.blocks.blocks_for(shared)])
        child.computed = child.hit = shared
        self._lines.run(child)

    def schedule(self) -> StepPlan:
        """The next step; empty when there is no work. Raises SchedulingError while one is open."""
        self._require_closed("schedule")
        self.steps += 1
        draft = self.draft(
            self.blocks, self.prefix, self._lines, self.max_sequences, self.token_budget
        )
        self._open = draft.plan()
        self.preemptions += len(self._open.preempted)
        return self._open

    def update(self, plan: StepPlan, sampled: dict[int, list[int]]) -> None:
        """Take the computed plan back, with the new tokens of each chunk that samples.

        A sequence that reaches `max_tokens` ends with "length"; any other end comes from
        `finish`, after this call. Sequences that ended since the plan was made are passed over.
        Raises SchedulingError, before anything changes, for another plan or tokens that do not
        fit it.
        """
        self._check_answer(plan, sampled)
        self._close()
        size = self.blocks.block_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.state != "running":
                continue
            start, end = chunk.start, chunk.start + chunk.count
            sequence.computed = end
            if end // size > start // size:
                self._index(sequence, start // size, end // size)
            if chunk.samples:
                tokens, most = sequence.tokens, sequence.prompt_length + sequence.max_tokens
                tokens += sampled[sequence.id][: most - len(tokens)]
                if len(tokens) == most:
                    self.finish(sequence.id, "length")

    def finish(self, id: int, reason: FinishReason) -> bool:
        """End a sequence. False when it had ended before.

        Its blocks are given back at once, or when the open plan is handed back: the runner may
        be reading and writing them.
        """
        sequence = self._live.pop(id, None)
        if sequence is None:
            return False
        self._lines.leave(sequence)
        if self._open is None:
            self.blocks.release(sequence.block_table)
        else:
            self._leaving.append(sequence)
        sequence.move("finished")
        sequence.finish = reason
        self._turnover.ended()
        return True

    def abort(self, id: int) -> bool:
        """End a sequence at its owner's wish; allowed while a plan is open."""
        return self.finish(id, "abort")

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The plan could not be computed: its sequences end with "error". Returns them."""
        self._check_open(plan)
        self._close()
        failed = [chunk.sequence for chunk in plan.chunks if chunk.sequence.state == "running"]
        for sequence in failed:
            self.finish(sequence.id, "error")
        return failed

    def restart(self, version: bytes) -> None:
        """The weights have changed: forget all that the old ones computed.

        Running sequences are put back and computed again, their tokens so far included. `version`
        must be one never used before. Raises SchedulingError while a plan is open.
        """
        self._require_closed("restart")
        while self._lines.running:
            self._lines.put_back_last()
        for sequence in self._lines.waiting:
            sequence.keys.clear()
        self.prefix.clear(version)

    def invariants(self) -> None:
        """Raise AssertionError naming what is broken; between any two calls nothing is."""
        running, waiting = self._lines.running, self._lines.waiting
        self.blocks.invariants([s.block_table for s in (*running, *self._leaving)])
        self.prefix.invariants()
        if self._open is None:
            self._lines.invariants()
        if len(running) > self.max_sequences:
            raise AssertionError(f"{len(running)} run at once")
        if {s.id for s in (*running, *waiting)} != self._live.keys():
            raise AssertionError("a sequence neither runs nor waits")

    def _close(self) -> None:
        self._open = None
        for sequence in self._leaving:
            self.blocks.release(sequence.block_table)
        self._leaving.clear()

    def _index(self, sequence: Sequence, first: int, end: int) -> None:
        keys = self.prefix.extend(sequence.keys, sequence.tokens, sequence.salt, end)
        for place in range(first, end):
            self.prefix.insert(keys[place], sequence.block_table[place])

    def _enter(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        sequence.order = (sequence.priority * self.aging + self.steps, sequence.arrival)
        self._live[sequence.id] = sequence

    def _check_new(self, sequence: Sequence) -> None:
        if sequence.id in self._live:
            raise SchedulingError(f"there is a sequence {sequence.id} already", "use a new id")
        check(sequence, self.blocks)

    def _check_answer(self, plan: StepPlan, sampled: dict[int, list[int]]) -> None:
        self._check_open(plan)
        wanted = set()
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            wanted.add(sequence.id)
            if not sampled.get(sequence.id) and sequence.state == "running":
                raise SchedulingError(
                    f"no token was sampled for sequence {sequence.id}", "sample one or more"
                )
        if not sampled.keys() <= wanted:
            raise SchedulingError(
                f"tokens were sampled for sequence {min(sampled.keys() - wanted)}, which the plan"
                " does not sample",
                "leave it out",
            )

    def _check_open(self, plan: StepPlan) -> None:
        if plan is not self._open:
            raise SchedulingError("this plan is not the open one", "hand back the last plan")

    def _require_closed(self, call: str) -> None:
        if self._open is not None:
            raise SchedulingError(f"{call} while a plan is open", "hand back that plan first")


def _check_fork(parent: Sequence, child: Sequence) -> None:
    shared = parent.computed
    if child.salt != parent.salt or child.tokens[:shared] != parent.tokens[:shared]:
        raise SchedulingError(
            f"sequence {child.id} does not begin with the {shared} computed tokens of {parent.id}",
            "fork with the parent's tokens and salt",
        )
    if len(child.tokens) == shared:
        raise SchedulingError(
            f"sequence {child.id} has {shared} tokens, all of them computed",
            "give it a next token of its own",
        )
