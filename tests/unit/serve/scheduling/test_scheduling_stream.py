"""Long random streams: nothing is read that was not written for it, and everything ends."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fivefold.engines.serve.scheduling.sequence import Sequence
from tests.unit.serve.scheduling.fake_model import VOCABULARY
from tests.unit.serve.scheduling.harness import Serving

STEPS = 20_000
MANY_STEPS = 400_000
EPISODE = 250


def serving(chance: random.Random) -> Serving:
    """From hopelessly few blocks to plenty."""
    block_size = chance.choice((1, 2, 3, 4, 8))
    max_sequences = chance.randint(1, 8)
    return Serving(
        chance.choice((3, 8, 20, 60)),
        block_size,
        max_sequences=max_sequences,
        token_budget=max_sequences + chance.choice((0, 1, 5, 30)),
        queue_limit=chance.choice((2, 8, 30)),
        aging=chance.choice((1, 10, 100)),
    )


class Stream:
    """Arrivals of like prompts, aborts at any moment, forks, crashes, new weights."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.serving = serving(self.chance)
        most = self.serving.blocks.num_blocks * self.serving.blocks.block_size
        self.longest = max(2, most // self.chance.choice((1, 2, 4)))
        self.arrivals = self.chance.choice((0.2, 0.7, 1.2))
        self.beginnings = [self.tokens(self.longest) for _ in range(3)]

    def tokens(self, most: int) -> list[int]:
        return [self.chance.randrange(VOCABULARY) for _ in range(self.chance.randint(1, most))]

    def prompt(self) -> list[int]:
        """Another turn of an earlier sequence, or a known beginning and something of its own."""
        chance = self.chance
        if self.serving.ended and chance.random() < 0.3:
            beginning = chance.choice(self.serving.ended[-8:]).tokens
        else:
            beginning = chance.choice(self.beginnings)
        if chance.random() < 0.5:
            beginning = beginning[: chance.randint(0, len(beginning))]
        return [*beginning, *self.tokens(4)]

    def arrive(self) -> None:
        chance = self.chance
        self.serving.add(
            self.prompt(),
            chance.randint(1, max(2, chance.choice((4, self.longest, 2 * self.longest)))),
            salt=chance.choice((b"", b"", b"", b"tenant")),
            priority=chance.choice((-2, 0, 0, 0, 1)),
            match_prefix=chance.random() < 0.9,
        )

    def leave(self) -> None:
        if self.serving.live and self.chance.random() < 0.05:
            self.serving.abort(self.any())

    def any(self) -> Sequence:
        return self.chance.choice(list(self.serving.live.values()))

    def branch(self) -> None:
        """Other answers to one prompt, or other ways to go on while it is being read."""
        chance, parent = self.chance, self.any()
        last = len(parent.tokens) - 1
        least = max(1, parent.computed)
        if least > last:
            return
        for _ in range(chance.randint(1, 3)):
            keep = last if parent.output_length else chance.randint(least, last)
            self.serving.fork(parent, chance.randrange(VOCABULARY), keep)

    def step(self) -> None:
        chance, serving = self.chance, self.serving
        while chance.random() < self.arrivals / 2:
            self.arrive()
        self.leave()
        if serving.live and chance.random() < 0.1:
            self.branch()
        if chance.random() < 0.003:
            serving.new_weights()
        plan = serving.schedule()
        self.leave()
        if chance.random() < 0.1:
            self.arrive()
        serving.check()
        extra = chance.choice((1, 2)) if chance.random() < 0.1 else 0
        serving.finish_step(plan, crash=chance.random() < 0.002, extra=extra)
        serving.check()


def run(steps: int, first_seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    seed = first_seed
    while seen["steps"] < steps:
        stream = Stream(seed)
        for _ in range(EPISODE):
            stream.step()
        stream.serving.drain()
        for _ in range(2):  # idle, and at work again
            stream.arrive()
            stream.serving.drain()
        seen += stream.serving.seen
        seed += 1
    return seen


def check_variety(seen: Counter[str]) -> None:
    """The stream was no easy one."""
    for name, least in {
        "preemptions": 200,
        "warm starts": 200,
        "partial prompts": 200,
        "mixed steps": 200,
        "evictions": 500,
        "copies": 50,
        "forks": 50,
        "aborts": 50,
        "aborts in a step": 20,
        "crashes": 5,
        "new weights": 5,
        "too long": 5,
        "queue full": 50,
        "answers": 500,
    }.items():
        assert seen[name] >= least, f"{name}: {seen[name]}"


def test_twenty_thousand_steps() -> None:
    seen = run(STEPS, first_seed=0)
    check_variety(seen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(2))
def test_hundreds_of_thousands_of_steps(part: int) -> None:
    seen = run(MANY_STEPS // 2, first_seed=1_000_000 * (part + 1))
    check_variety(seen)
