"""Which sequences are taken at all, and when to come back with those that are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fivefold.core.errors import PromptError
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.errors import QueueFullError, SchedulingError
from fivefold.engines.serve.scheduling.sequence import Sequence

PRIORITIES = range(-100, 101)
"""Bounded, as every class of difference is so many steps of waiting."""
FIRST_ESTIMATE = 1.0
LONGEST_ESTIMATE = 60.0
ENDS_REMEMBERED = 32


def check(sequence: Sequence, blocks: BlockManager) -> None:
    """Raise SchedulingError for a broken record, PromptError for one that could never run."""
    if sequence.state != "waiting" or sequence.block_table or sequence.computed:
        raise SchedulingError(
            f"sequence {sequence.id} is {sequence.state} with {sequence.computed} tokens computed",
            "add a new record",
        )
    if not 1 <= sequence.prompt_length <= len(sequence.tokens):
        raise SchedulingError(
            f"sequence {sequence.id} has {len(sequence.tokens)} tokens and a prompt_length of"
            f" {sequence.prompt_length}",
            "a prompt has at least one token, and the tokens begin with it",
        )
    if sequence.max_tokens <= sequence.output_length:
        raise SchedulingError(
            f"sequence {sequence.id} has {sequence.output_length} of max_tokens="
            f"{sequence.max_tokens} already",
            "there must be a token to produce",
        )
    if sequence.priority not in PRIORITIES:
        raise PromptError(
            f"priority={sequence.priority!r} is out of range",
            f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}",
        )
    needed = blocks.blocks_for(sequence.most_slots)
    if needed > blocks.num_blocks:
        raise PromptError(
            f"a prompt of {sequence.prompt_length} tokens with {sequence.max_tokens} to produce"
            f" needs {needed} blocks of {blocks.block_size}, but the cache has"
            f" {blocks.num_blocks}",
            "shorten the prompt, lower the tokens to produce, or give the cache more memory",
        )


def check_settings(max_sequences: int, token_budget: int, queue_limit: int, aging: int) -> None:
    """Raise SchedulingError for settings that cannot work."""
    settings = {
        "max_sequences": max_sequences,
        "token_budget": token_budget,
        "queue_limit": queue_limit,
        "aging": aging,
    }
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SchedulingError(f"{name}={value!r}", f"{name} must be at least 1")
    if token_budget < max_sequences:
        raise SchedulingError(
            f"token_budget={token_budget} is less than max_sequences={max_sequences}",
            "each running sequence needs one token a step",
        )


class Turnover:
    """How fast sequences end, for saying when a place in the queue will be free."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS_REMEMBERED)
        self._refused = 0

    def ended(self) -> None:
        """A sequence has ended, so one that waits can run."""
        self._ends.append(self._clock())
        self._refused = 0

    def refusal(self, waiting: int) -> QueueFullError:
        """Those refused before this one come back first: each is given its own place in time."""
        self._refused += 1
        if len(self._ends) < 2:
            return QueueFullError(waiting, FIRST_ESTIMATE)
        interval = (self._clock() - self._ends[0]) / len(self._ends)
        estimate = max(FIRST_ESTIMATE, interval * self._refused)
        return QueueFullError(waiting, min(estimate, LONGEST_ESTIMATE))
