"""The server's side of one engine process: requests in, pieces of answers out, a new process
when it dies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from fivefold.core.errors import FivefoldError
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.engine_link import EngineLink
from fivefold.engines.serve.server.messages import (
    Abort,
    Accepted,
    Command,
    Embed,
    Embedded,
    EngineOptions,
    Failed,
    Pooling,
    Ready,
    Refused,
    Reply,
    Submit,
    Update,
    Updates,
)

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a new process is started: doubled for each that dies soon."""
SOUND_SECONDS = 60.0
"""After so long an engine is taken to be sound, and its end to be the first."""
RETRY_SECONDS = 5.0
LOOKS = 4
"""How often, in the time that an engine may be silent, it is looked after."""

Sink = Callable[["Update | APIError"], None]
log = logging.getLogger("fivefold.serve")


class EngineClient:
    """Talks to one engine process, and starts another when it ends unasked."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.ready: Ready | None = None
        """What the process said of itself; None while there is none that serves."""
        self.state: EngineState | None = None
        self.restarts = 0
        self.why_down = "the engine is starting"
        self._ids = itertools.count()
        self._sinks: dict[int, Sink] = {}
        self._replies: dict[int, asyncio.Future[list[float] | None]] = {}
        self._started: asyncio.Future[Ready] | None = None
        self._failed: Failed | None = None
        self._failures = 0
        self._ready_at = 0.0
        self._stopping = False
        self._restart: asyncio.Task[None] | None = None
        self._link: EngineLink | None = None
        self._heard = 0.0  # when the engine last said something, or was asked after it had rested
        self._watch: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks) + len(self._replies)

    async def start(self) -> Ready:
        """Until the model is loaded. Raises FivefoldError when it cannot be."""
        self._started = asyncio.get_running_loop().create_future()
        self._launch()
        ready = await self._started
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        return ready

    async def stop(self) -> None:
        """End the process."""
        self._stopping = True
        for task in (self._restart, self._watch):
            if task is not None:
                task.cancel()
        if self._link is not None:
            await self._link.stop()

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> int:
        """The id of an accepted request, whose pieces, or one error, go to `sink`.

        Raises APIError: 400 for what the engine cannot take, 429 when too many wait, 503 when
        there is no engine.
        """
        id = next(self._ids)
        self._sinks[id] = sink
        try:
            await self._ask(id, Submit(id, prompt, params, priority, tenant))
        except BaseException:
            self.abort(id)
            raise
        return id

    async def embed(self, prompt: list[int], pooling: Pooling) -> list[float]:
        """The pooled hidden states, [D]. Raises APIError as `submit` does."""
        id = next(self._ids)
        vector = await self._ask(id, Embed(id, prompt, pooling))
        assert vector is not None
        return vector

    def abort(self, id: int) -> None:
        """Free what a request holds, if it has not ended."""
        if self._sinks.pop(id, None) is not None and self.ready is not None:
            self._send(Abort(id))

    async def _ask(self, id: int, command: Command) -> list[float] | None:
        if self.ready is None:
            raise self._down(f"{self.why_down}; try again soon")
        if not self._replies and len(self._sinks) <= 1:  # of one that rested no word was due
            self._heard = time.monotonic()
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        self._send(command)
        try:
            return await reply
        finally:
            self._replies.pop(id, None)

    async def _look_after(self) -> None:
        """End a process that lives and works no more, as nobody else would."""
        limit = self.options.silence_seconds
        while True:
            await asyncio.sleep(limit / LOOKS)
            silent = time.monotonic() - self._heard
            if self.ready is not None and self.in_flight and silent > limit:
                assert self._link is not None
                self._link.end(f"said nothing for {silent:.0f} s while requests waited")

    def _send(self, command: Command) -> None:
        assert self._link is not None
        self._link.send(command)

    def _launch(self) -> None:
        self._failed = None
        self._link = EngineLink(self.options, self._take, self._ended)

    def _take(self, reply: Reply) -> None:
        self._heard = time.monotonic()
        match reply:
            case Updates(updates=updates, state=state):
                self.state = state
                for update in updates:
                    self._hand_out(update)
            case Accepted(id=id):
                self._settle(id, None)
            case Embedded(id=id, vector=vector):
                self._settle(id, vector)
            case Refused(id=id):
                self._sinks.pop(id, None)
                self._settle(id, refusal(reply))
            case Ready():
                self.ready, self.state = reply, reply.state
                self._ready_at = time.monotonic()
                if self._started is not None and not self._started.done():
                    self._started.set_result(reply)
                elif self.restarts:
                    log.warning("the engine serves again")
            case Failed():
                self._failed = reply

    def _hand_out(self, update: Update) -> None:
        sink = self._sinks.get(update.id)
        if sink is not None:  # else it was aborted meanwhile
            sink(update)

    def ended(self, id: int) -> None:
        """The request's last piece was taken."""
        self._sinks.pop(id, None)

    def _settle(self, id: int, found: list[float] | APIError | None) -> None:
        reply = self._replies.get(id)
        if reply is None or reply.done():
            return
        if isinstance(found, APIError):
            reply.set_exception(found)
        else:
            reply.set_result(found)

    def _ended(self) -> None:
        """The process is gone: tell those who wait, and start another."""
        assert self._link is not None
        if self._stopping:
            self._fail_all("the server is stopping")
            return
        how = self._link.how_it_ended()
        if self._failed is not None:
            how = f"could not serve: {FivefoldError(self._failed.message, self._failed.mend)}"
        if self._started is not None and not self._started.done():
            failed = self._failed or Failed(f"the engine process {how}", "see its output above")
            self._started.set_exception(EngineError(failed.message, failed.mend))
            return
        sound = self.ready is not None and time.monotonic() - self._ready_at > SOUND_SECONDS
        self._failures = 1 if sound else self._failures + 1
        self.ready = self.state = None
        self.why_down = f"the engine process {how}; it is being restarted"
        log.error(self.why_down)
        self._fail_all(f"{self.why_down}, but this request is lost; send it again")
        self._restart = asyncio.get_running_loop().create_task(self._launch_later())

    async def _launch_later(self) -> None:
        await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self._failures - 1)))
        self.restarts += 1
        self._launch()

    def _fail_all(self, why: str) -> None:
        error = self._down(why)
        for id in list(self._replies):
            self._settle(id, error)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(error)

    def _down(self, why: str) -> APIError:
        return APIError(503, why, code="engine_down", retry_after=RETRY_SECONDS)


def refusal(refused: Refused) -> APIError:
    """The answer to a request that the engine does not take."""
    message = str(FivefoldError(refused.message, refused.mend))
    if refused.kind == "full":
        return APIError(429, message, code="queue_full", retry_after=refused.retry_after)
    if refused.kind == "prompt":
        return APIError(400, message)
    return APIError(500, message, code="engine_error")
