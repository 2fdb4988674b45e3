"""The same, driven by hypothesis: what breaks comes back as a short program."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fivefold.engines.serve.scheduling.plan import StepPlan
from tests.unit.serve.scheduling.fake_model import VOCABULARY
from tests.unit.serve.scheduling.harness import Serving

TOKEN = st.integers(0, VOCABULARY - 1)
BEGINNING = [1, 2, 0, 0, 1, 2, 2, 1, 0, 2, 1, 1]
PROMPT = st.builds(
    lambda length, own: BEGINNING[:length] + own,
    st.integers(0, len(BEGINNING)),
    st.lists(TOKEN, min_size=1, max_size=4),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any calls in any order that the contract allows; few blocks, so that they run out."""

    serving: Serving
    plan: StepPlan | None = None

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        max_sequences=st.sampled_from((4, 3, 2, 1)),
        more=st.integers(0, 8),
        queue_limit=st.sampled_from((10, 2)),
    )
    def start(
        self, num_blocks: int, block_size: int, max_sequences: int, more: int, queue_limit: int
    ) -> None:
        self.serving = Serving(
            num_blocks,
            block_size,
            max_sequences=max_sequences,
            token_budget=max_sequences + more,
            queue_limit=queue_limit,
            aging=4,
        )

    @rule(
        prompts=st.lists(PROMPT, min_size=1, max_size=3),
        max_tokens=st.sampled_from((1, 5, 9, 16)),
        salt=st.sampled_from((b"", b"tenant")),
        priority=st.integers(-1, 1),
        match_prefix=st.sampled_from((True, True, False)),
    )
    def add(self, prompts: list[list[int]], max_tokens: int, **fields: object) -> None:
        for prompt in prompts:
            self.serving.add(prompt, max_tokens, **fields)

    @precondition(lambda self: self.plan is None and self.serving.live)
    @rule(
        times=st.integers(1, 8),
        extra=st.sampled_from((0, 0, 1, 2)),
        branches=st.lists(TOKEN, max_size=3),
    )
    def step(self, times: int, extra: int, branches: list[int]) -> None:
        self.serving.step(extra=extra)
        answering = [s for s in self.serving.scheduler.running if s.output_length > 0]
        for parent, token in zip(answering * len(branches), branches, strict=False):
            self.serving.fork(parent, token)
        for _ in range(times):
            self.serving.step()

    @precondition(lambda self: self.plan is None and self.serving.live)
    @rule()
    def schedule(self) -> None:
        self.plan = self.serving.schedule()

    @precondition(lambda self: self.plan is not None)
    @rule(crash=st.sampled_from((False, False, False, True)))
    def hand_back(self, crash: bool) -> None:
        assert self.plan is not None
        self.serving.finish_step(self.plan, crash=crash)
        self.plan = None

    @precondition(lambda self: self.serving.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.serving.abort(data.draw(st.sampled_from(list(self.serving.live.values())), "who"))

    @precondition(lambda self: self.plan is None and self.serving.scheduler.running)
    @rule()
    def new_weights(self) -> None:
        self.serving.new_weights()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "serving"):
            self.serving.check()

    def teardown(self) -> None:
        if not hasattr(self, "serving"):
            return
        if self.plan is not None:
            self.serving.finish_step(self.plan)
        self.serving.drain(5_000)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    deadline=None, derandomize=True, max_examples=120, stateful_step_count=30
)
