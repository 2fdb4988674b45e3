"""The order of work of systems that read waiting prompts before any answer goes on."""

from __future__ import annotations

from fivefold.engines.serve.scheduling.draft import Draft
from fivefold.engines.serve.scheduling.plan import StepPlan


class PromptsFirst(Draft):
    """A step is either prompts, or one token for each answer when no prompt can be read."""

    def plan(self) -> StepPlan:
        """Fill the draft."""
        budget = self._budget
        self._budget += sum(each.remaining == 1 for each in self._lines.running)
        self._continue_prompts()
        if not self._preempted:
            self._start_waiting()
        if not self._prompts:
            self._budget = budget
            self._continue_running()
        chunks = (*self._singles, *self._prompts)
        return StepPlan(chunks, tuple(self._preempted), tuple(self._copies))

    def _continue_prompts(self) -> None:
        for sequence in list(self._lines.running):
            if sequence.state != "running" or sequence.remaining == 1 or not self._budget:
                continue
            count = min(sequence.remaining, self._budget)
            if self._make_room(sequence, sequence.computed + count):
                self._read_prompt(sequence, count)
