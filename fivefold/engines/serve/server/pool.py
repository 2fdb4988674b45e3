"""The engines behind one server: one, or several equal ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.server.engine_client import EngineClient
from fivefold.engines.serve.server.messages import EngineOptions, Ready


class EnginePool:
    """Replicas of one engine; each request goes to one of them."""

    def __init__(self, options: EngineOptions, replicas: int = 1) -> None:
        self.clients = [EngineClient(options) for _ in range(replicas)]

    async def start(self) -> Ready:
        """Until all serve: what the first said of itself. Raises FivefoldError."""
        try:
            return (await asyncio.gather(*(client.start() for client in self.clients)))[0]
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(client.stop() for client in self.clients))

    @property
    def is_ready(self) -> bool:
        """Whether a request would find an engine."""
        return any(client.ready is not None for client in self.clients)

    @property
    def why_down(self) -> str:
        """What is wrong while none serves."""
        return self.clients[0].why_down

    def choose(self, prompt: Sequence[int]) -> EngineClient:
        """The engine for a prompt."""
        return self.clients[0]

    def states(self) -> list[EngineState | None]:
        """What each is busy with; None for one that is down."""
        return [client.state for client in self.clients]
