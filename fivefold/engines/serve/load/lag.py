"""How long the client's own event loop was busy: what it timed may be late by that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

TICK = 0.01


class LoopLag:
    """Sleeps again and again, and notes how much longer each sleep took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._clock = clock

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(TICK)
            self.seconds.append(max(0.0, self._clock() - before - TICK))
