"""The engines behind one server: one, or several equal ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.server.engine_client import EngineClient
from fivefold.engines.serve.server.messages import EngineOptions, Ready
from fivefold.engines.serve.server.router import PrefixRouter


class EnginePool:
    """Replicas of one engine; each request goes to one of them."""

    def __init__(self, options: EngineOptions, replicas: int = 1) -> None:
        self.clients = [EngineClient(replace(options, replica=i)) for i in range(replicas)]
        self._router: PrefixRouter | None = None
        self._restarts = [0] * replicas

    async def start(self) -> Ready:
        """Until all serve: what the first said of itself. Raises FivefoldError."""
        try:
            ready = (await asyncio.gather(*(client.start() for client in self.clients)))[0]
        except BaseException:
            await self.stop()
            raise
        self._router = PrefixRouter(len(self.clients), ready.block_size)
        return ready

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

    def choose(self, prompt: Sequence[int], tenant: str) -> EngineClient:
        """The engine whose cache is the likeliest to hold the prompt's beginning."""
        if self._router is None or len(self.clients) == 1 or not self.is_ready:
            return self.clients[0]
        for place, client in enumerate(self.clients):
            if client.restarts != self._restarts[place]:
                self._restarts[place] = client.restarts
                self._router.forget(place)
        loads = [None if c.ready is None else c.in_flight for c in self.clients]
        return self.clients[self._router.choose(prompt, tenant, loads)]

    def least_busy(self) -> EngineClient:
        """For work that no cache helps with."""
        return min(self.clients, key=lambda client: (client.ready is None, client.in_flight))

    def states(self) -> list[EngineState | None]:
        """What each is busy with; None for one that is down."""
        return [client.state for client in self.clients]
