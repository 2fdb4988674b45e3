"""A scheduler with a fake model, everything checked on the way."""

from __future__ import annotations

from collections import Counter

from fivefold.core.errors import PromptError
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.errors import QueueFullError
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.fake_model import FakeModel, answer


class Serving:
    """Adds, steps, aborts, forks; `seen` counts what happened, so that tests are not vacuous."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        max_sequences: int = 4,
        token_budget: int = 16,
        queue_limit: int = 100,
        aging: int = 16,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.prefix = PrefixIndex(self.blocks)
        self._forget, self.blocks.on_evict = self.blocks.on_evict, self._evicted
        self.scheduler = Scheduler(
            self.blocks,
            self.prefix,
            max_sequences=max_sequences,
            token_budget=token_budget,
            queue_limit=queue_limit,
            aging=aging,
        )
        self.model = FakeModel(self.blocks)
        self.live: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self.seen: Counter[str] = Counter()
        self._computed: dict[int, int] = {}  # by id, since it last started
        self._untouched: dict[int, tuple[bytes, int]] = {}  # version, length as added
        self._next_id = 0
        self._versions = 0

    def new(self, tokens: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
        """A record with a fresh id; `prompt_length` is all of the tokens unless given."""
        self._next_id += 1
        fields.setdefault("prompt_length", len(tokens))
        return Sequence(self._next_id, list(tokens), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]

    def add(self, tokens: list[int], max_tokens: int = 4, **fields: object) -> Sequence | None:
        """Queue a prompt; None when it is refused, which must be for cause."""
        sequence = self.new(tokens, max_tokens, **fields)
        needed = self.blocks.blocks_for(len(tokens) + max_tokens - 1)
        try:
            self.scheduler.add(sequence)
        except PromptError:
            assert needed > self.blocks.num_blocks
            self.seen["too long"] += 1
            return None
        except QueueFullError as error:
            assert len(self.scheduler.waiting) >= self.scheduler.queue_limit
            assert error.retry_after >= 1
            self.seen["queue full"] += 1
            return None
        assert needed <= self.blocks.num_blocks
        self._entered(sequence)
        return sequence

    def fork(self, parent: Sequence, token: int, keep: int | None = None) -> Sequence:
        """A sequence that goes another way after `keep` tokens: at its parent's last one."""
        keep = len(parent.tokens) - 1 if keep is None else keep
        assert max(parent.computed, 1) <= keep < len(parent.tokens)
        child = self.new(
            [*parent.tokens[:keep], token],
            parent.max_tokens,
            prompt_length=min(parent.prompt_length, keep + 1),
            salt=parent.salt,
        )
        self.scheduler.fork(parent.id, child)
        self._entered(child)
        if child.state == "running":
            self._computed[child.id] = child.computed
            self.seen["forks"] += 1
        return child

    def abort(self, sequence: Sequence) -> None:
        assert self.scheduler.abort(sequence.id)
        assert not self.scheduler.abort(sequence.id)
        assert sequence.finish == "abort"
        self.seen["aborts"] += 1
        self._left(sequence)

    def schedule(self) -> StepPlan:
        """Make a plan and check it before it is computed."""
        before = set(self.scheduler.running)
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.seen["steps"] += bool(plan.chunks)
        self.seen["tokens"] += plan.token_count
        self.seen["preemptions"] += len(plan.preempted)
        self.seen["copies"] += len(plan.copies)
        self.seen["mixed steps"] += len({chunk.count == 1 for chunk in plan.chunks}) == 2
        started = set(self.scheduler.running) - before
        self.seen["warm starts"] += sum(s.computed > 0 for s in started)
        self.seen["partial prompts"] += sum(not c.samples for c in plan.chunks)
        return plan

    def finish_step(self, plan: StepPlan, *, crash: bool = False, extra: int = 0) -> None:
        """Compute the plan and hand it back; `extra` more tokens are accepted at once."""
        if crash:
            self.model.crash(plan)
            for sequence in self.scheduler.fail(plan):
                assert sequence.finish == "error"
                self._left(sequence)
            self.seen["crashes"] += 1
            return
        for chunk in plan.chunks:
            self._computed[chunk.sequence.id] = chunk.start + chunk.count
        aborted = any(chunk.sequence.state == "finished" for chunk in plan.chunks)
        self.seen["aborts in a step"] += aborted
        sampled = {id: [token] * (1 + extra) for id, token in self.model.compute(plan).items()}
        if extra:
            for id in sampled.keys() & self._untouched.keys():
                del self._untouched[id]
        self.scheduler.update(plan, sampled)
        for chunk in plan.chunks:
            if chunk.sequence.state == "finished" and chunk.sequence.id in self.live:
                assert chunk.sequence.finish == "length"
                assert chunk.sequence.output_length == chunk.sequence.max_tokens
                self._check_answer(chunk.sequence)
                self._left(chunk.sequence)

    def step(self, **how: object) -> StepPlan:
        """One whole step, with every invariant checked around it."""
        plan = self.schedule()
        self.check()
        self.finish_step(plan, **how)  # type: ignore[arg-type]
        self.check()
        return plan

    def new_weights(self) -> None:
        self._versions += 1
        version = self._versions.to_bytes(4, "little")
        self.scheduler.restart(version)
        self.model.new_weights(version)
        self._computed.clear()
        self.seen["new weights"] += 1
        assert self.blocks.free_count == self.blocks.num_blocks

    def drain(self, limit: int = 100_000) -> None:
        """Step until nothing is left: every sequence ends, every block is free or cached."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work and not self.live
        assert self.blocks.owned_count == 0
        assert self.blocks.free_count + self.blocks.cached_count == self.blocks.num_blocks

    def check(self) -> None:
        self.scheduler.invariants()
        assert self.scheduler.has_work == bool(self.live)

    def _evicted(self, block: int) -> None:
        self.seen["evictions"] += 1
        assert all(block not in s.block_table for s in self.scheduler.running)
        self._forget(block)

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        assert plan.token_count <= scheduler.token_budget
        assert bool(plan.chunks) == scheduler.has_work, "a step without progress"
        ids = [chunk.sequence.id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids), "a sequence twice in a step"
        for sequence in plan.preempted:
            self._computed.pop(sequence.id, None)
            assert all(sequence.order > chunk.sequence.order for chunk in plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            end = chunk.start + chunk.count
            assert sequence.state == "running" and chunk.count >= 1
            assert chunk.samples == (end == len(sequence.tokens))
            assert self.blocks.blocks_for(end) <= len(sequence.block_table)
            if sequence.id in self._computed:
                assert chunk.start == self._computed[sequence.id], "a token twice, or left out"
            else:
                assert chunk.start % self.blocks.block_size == 0

    def _check_answer(self, sequence: Sequence) -> None:
        """The answer is that of the prompt alone, where nothing but the scheduler took part."""
        version, length = self._untouched.pop(sequence.id, (b"?", 0))
        if version == self.model.version:
            count = len(sequence.tokens) - length
            tokens = sequence.tokens[:length]
            assert sequence.tokens[length:] == answer(tokens, count, sequence.salt, version)
            self.seen["answers"] += 1

    def _entered(self, sequence: Sequence) -> None:
        self.live[sequence.id] = sequence
        self._untouched[sequence.id] = (self.model.version, len(sequence.tokens))
        self.seen["sequences"] += 1

    def _left(self, sequence: Sequence) -> None:
        del self.live[sequence.id]
        self._computed.pop(sequence.id, None)
        self._untouched.pop(sequence.id, None)
        self.model.forget(sequence)
        self.ended.append(sequence)


def added(serving: Serving, tokens: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
    """A prompt that is not refused."""
    sequence = serving.add(tokens, max_tokens, **fields)
    assert sequence is not None
    return sequence
