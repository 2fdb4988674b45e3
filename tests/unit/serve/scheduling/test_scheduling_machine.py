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
from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.fake_model import VOCABULARY
from tests.unit.serve.scheduling.harness import Serving

TOKEN = st.integers(0, VOCABULARY - 1)
PROMPT = st.lists(TOKEN, min_size=1, max_size=14)


class SchedulerMachine(RuleBasedStateMachine):
    """Any calls in any order that the contract allows; few blocks, so that they run out."""

    serving: Serving
    plan: StepPlan | None = None

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.integers(1, 4),
        max_sequences=st.integers(1, 4),
        more=st.integers(0, 8),
        queue_limit=st.integers(1, 6),
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
        prompt=PROMPT,
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from((b"", b"tenant")),
        priority=st.integers(-1, 1),
        match_prefix=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, **fields: object) -> None:
        self.serving.add(prompt, max_tokens, **fields)

    @precondition(lambda self: self.plan is None)
    @rule(times=st.integers(1, 6), extra=st.integers(0, 2))
    def step(self, times: int, extra: int) -> None:
        for _ in range(times):
            self.serving.step(extra=extra)

    @precondition(lambda self: self.plan is None)
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
        self.serving.abort(self._any(data))

    @precondition(lambda self: self.plan is None and self.serving.live)
    @rule(data=st.data(), token=TOKEN)
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = self._any(data)
        if parent.output_length > 0:
            self.serving.fork(parent, token)

    @precondition(lambda self: self.plan is None)
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

    def _any(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(list(self.serving.live.values())), "sequence")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    deadline=None, derandomize=True, max_examples=60, stateful_step_count=40
)
