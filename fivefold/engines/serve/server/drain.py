"""Stopping without cutting anybody short: new work is refused, what runs may end."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from fivefold.engines.serve.server.api_errors import APIError

WATCHED = ("/health", "/ready", "/metrics", "/engine")
"""Answered to the end, and waited for by nobody."""


class Drain:
    """Whether the server takes work, and how much it has."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def finish(self, seconds: float) -> int:
        """Take no more work; wait for what runs. Requests that are left after the time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self.running

    def begin(self) -> None:
        """A request has come."""
        self.running += 1
        self._idle.clear()

    def end(self) -> None:
        """A request has gone."""
        self.running -= 1
        if not self.running:
            self._idle.set()


class DrainGate:
    """ASGI middleware: counts requests, and answers 503 while draining."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse or count."""
        if scope["type"] != "http" or scope["path"] in WATCHED:
            await self.app(scope, receive, send)
            return
        if self.drain.draining:
            error = APIError(503, "the server is stopping; send it to another", code="draining")
            await error.response()(scope, receive, send)
            return
        self.drain.begin()
        try:
            await self.app(scope, receive, send)
        finally:
            self.drain.end()
