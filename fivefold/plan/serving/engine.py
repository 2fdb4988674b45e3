"""An engine whose steps are timed instead of computed: the real scheduler, blocks and index."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.draft import Draft
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.batch import Batch
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.policy import PromptsFirst
from fivefold.plan.serving.step import model
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.shape import ModelShape

QUEUE = 10**9
"""The simulation refuses nobody: what waits too long misses its SLO."""


@dataclass
class Progress:
    """One request at one engine."""

    sequence: Sequence
    received: int = 0
    """Leading tokens whose keys and values came from another engine."""


class SimulatedEngine:
    """Takes sequences and makes steps; `step` returns how long one takes and who got a token."""

    def __init__(
        self,
        shape: ModelShape,
        strategy: ServingStrategy,
        cluster: Cluster,
        *,
        prefix_cache: bool = False,
        receives: bool = False,
        blocks: int | None = None,
    ) -> None:
        found = room(shape, strategy, cluster)
        self.strategy = strategy
        self.blocks = BlockManager(blocks or found.blocks, strategy.block_size)
        self.prefix = PrefixIndex(self.blocks)
        self._prefix_cache = prefix_cache
        self._cost = model(shape, strategy, cluster)
        first = strategy.system.order == "prompts-first"
        budget = strategy.budget
        if receives:  # whole prompts arrive computed: they take no tokens of a step
            budget = max(budget, found.tokens + strategy.max_sequences)
        self.scheduler = Scheduler(
            self.blocks,
            self.prefix,
            max_sequences=strategy.max_sequences,
            token_budget=max(budget, strategy.max_sequences),
            queue_limit=QUEUE,
            clock=lambda: self.now,
            draft=PromptsFirst if first and not receives else Draft,
        )
        self.now = 0.0
        self.busy = 0.0
        self.read_prompts = False
        """Whether the last step read prompts."""
        self._at_work: dict[int, Progress] = {}
        self._plan: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.has_work

    @property
    def load(self) -> int:
        """Requests here, those that wait included."""
        return len(self._at_work)

    def add(self, id: int, tokens: list[int], output: int, received: int = 0) -> None:
        """Queue a request for `output` tokens. Raises PlanError for one that never fits."""
        sequence = Sequence(
            id=id,
            tokens=tokens,
            prompt_length=len(tokens),
            max_tokens=output,
            match_prefix=self._prefix_cache,
        )
        if self.blocks.blocks_for(sequence.most_slots) > self.blocks.num_blocks:
            held = self.blocks.num_blocks * self.blocks.block_size
            raise PlanError(
                f"a request of {len(tokens)} tokens with {output} to produce is more than the"
                f" {held} tokens that the cache holds",
                "use more devices an engine, narrower keys and values, or cut the requests",
            )
        self.scheduler.add(sequence)
        self._at_work[id] = Progress(sequence, received)

    def begin(self, now: float) -> float:
        """Plan a step that begins now: its seconds."""
        self.now = now
        self._plan = self.scheduler.schedule()
        for sequence in self._plan.preempted:  # computed here when it runs again
            self._at_work[sequence.id].received = 0
        batch = self._batch(self._plan)
        self.read_prompts = batch.prompt > 0
        seconds = self._cost.seconds(batch)
        self.busy += seconds
        return seconds

    def end(self, now: float) -> tuple[list[int], list[int]]:
        """The step is done: who got a token, and which of these have ended."""
        self.now = now
        plan = self._plan
        assert plan is not None
        sampled = {chunk.sequence.id: [0] for chunk in plan.chunks if chunk.samples}
        self.scheduler.update(plan, sampled)
        self._plan = None
        ended = []
        for id in sampled:
            if self._at_work[id].sequence.finish is not None:
                del self._at_work[id]
                ended.append(id)
        return list(sampled), ended

    def hit(self, id: int) -> int:
        """Tokens of a request's prompt that were found in the cache."""
        return self._at_work[id].sequence.hit

    def _batch(self, plan: StepPlan) -> Batch:
        rows = prompt = sampled = context = 0
        pairs = read = 0.0
        for chunk in plan.chunks:
            start, count = chunk.start, chunk.count
            if count > 1:
                came = self._at_work[chunk.sequence.id].received
                if came > start:  # transferred, not computed
                    count -= min(came, start + count - 1) - start
                    start = chunk.start + chunk.count - count
            if count == 1:
                rows += 1
                context += start + 1
            else:
                prompt += count
                pairs += count * start + count * (count + 1) / 2
                read += start
            sampled += chunk.samples
        return Batch(rows, context, prompt, pairs, read, sampled)
