"""Runs a load: requests at their times whatever the server does, or so many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fivefold.engines.serve.load.client import Client
from fivefold.engines.serve.load.lag import LoopLag
from fivefold.engines.serve.load.material import Material
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.target import Target
from fivefold.engines.serve.load.workload import Asked


@dataclass(frozen=True)
class OpenLoop:
    """Requests arrive at these times and wait for nobody."""

    times: Sequence[float]
    name: str


@dataclass(frozen=True)
class ClosedLoop:
    """So many users; each asks anew when the answer is there."""

    concurrency: int

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.concurrency} at once"


Load = OpenLoop | ClosedLoop


class Watcher(Protocol):
    """Is told what goes on."""

    def sent(self) -> None:
        """A request went out."""

    def token(self) -> None:
        """A piece of an answer came."""

    def ended(self, outcome: Outcome) -> None:
        """A request has ended."""


class Silent:
    """Watches nothing."""

    def sent(self) -> None:
        """Nothing."""

    def token(self) -> None:
        """Nothing."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing."""


@dataclass
class Run:
    """All that was noted. `loop_lag`: how long the client's event loop was busy at a time."""

    load: Load
    outcomes: list[Outcome] = field(default_factory=list)
    loop_lag: list[float] = field(default_factory=list)
    interrupted: bool = False


class Runner:
    """Sends what is asked to one target.

    `duration`: seconds after which nothing is sent any more. Bodies are made before their time.
    """

    def __init__(
        self, client: Client, target: Target, material: Material, watcher: Watcher | None = None
    ) -> None:
        self._client = client
        self._target = target
        self._material = material
        self._watcher = watcher or Silent()

    async def run(self, asked: Sequence[Asked], load: Load, duration: float | None = None) -> Run:
        """Until all have ended; on cancellation (Ctrl-C) what has ended by then."""
        run = Run(load)
        began = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - began

        send = self._open if isinstance(load, OpenLoop) else self._closed
        async with LoopLag(clock) as lag:
            try:
                await send(run, asked, load, duration, clock)  # type: ignore[arg-type]
            except asyncio.CancelledError:
                run.interrupted = True
        run.loop_lag = lag.seconds
        run.outcomes.sort(key=lambda outcome: outcome.index)
        return run

    async def _open(
        self, run: Run, asked: Sequence[Asked], load: OpenLoop, duration: float | None,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for index, (each, at) in enumerate(zip(asked, load.times, strict=True)):
                if duration is not None and at > duration:
                    break
                body = self.body(each)
                await asyncio.sleep(max(0.0, at - clock()))
                group.create_task(self._one(run, each, body, index, at, clock))

    async def _closed(
        self, run: Run, asked: Sequence[Asked], load: ClosedLoop, duration: float | None,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        left = iter(enumerate(asked))

        async def user() -> None:
            for index, each in left:
                body = self.body(each)
                if duration is not None and clock() > duration:
                    break
                await self._one(run, each, body, index, clock(), clock)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(asked))):
                group.create_task(user())

    async def _one(
        self, run: Run, asked: Asked, body: bytes, index: int, at: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        outcome = Outcome(index, at, at, at, asked.input_tokens, asked.output_tokens)
        run.outcomes.append(outcome)
        self._watcher.sent()
        try:
            await self._client.send(self._target, body, outcome, clock, self._watcher.token)
        finally:
            self._watcher.ended(outcome)

    def body(self, asked: Asked) -> bytes:
        """The bytes of one request."""
        prompt = self._material.prompt(asked.parts) if asked.text is None else asked.text
        return self._target.body(prompt, asked.output_tokens)
