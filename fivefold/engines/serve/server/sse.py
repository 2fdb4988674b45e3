"""Answers that end when their client does: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fivefold.engines.serve.server.api_errors import APIError

T = TypeVar("T")
log = logging.getLogger("fivefold.serve")
CLIENT_LEFT = 499
"""Status for the log alone, as nginx has it: nobody reads it."""


class ClientLeftError(Exception):
    """There is nobody to answer."""


async def left(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client leaves (ClientLeftError)."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        await _cancel(working, leaving)


class EventStream(Response):
    """Sends each event as it comes, then `[DONE]`; an error is the last event.

    `close` is called in the end, however that comes about. `seconds` is how long an answer takes at
    most.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None], seconds: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        # After `seconds` the answer ends itself, with an event that says so; what was written until
        # then goes before it. So a client may still be reading for as long again.
        self._seconds = 2 * seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the last event, or until the client leaves or reads no more for too long."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(left(receive))
        try:
            await asyncio.wait(
                {sending, leaving}, return_when=asyncio.FIRST_COMPLETED, timeout=self._seconds
            )
            if sending.done():
                sending.result()
        except OSError:  # it left while something was sent
            pass
        finally:
            await _cancel(sending, leaving)
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for event in self._events:
                await send(_body(json.dumps(event, ensure_ascii=False, separators=(",", ":"))))
                await asyncio.sleep(0)  # others' turn; and a client that left is noticed
            await send(_body("[DONE]"))
        except APIError as error:
            await send(_body(json.dumps(error.body())))
        except OSError:
            raise
        except Exception:
            log.exception("an answer failed while it was streamed")
            await send(_body(json.dumps(APIError(500, "the server failed").body())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: str) -> dict[str, Any]:
    text = f"data: {data}\n\n".encode("utf-8", "replace")
    return {"type": "http.response.body", "body": text, "more_body": True}


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
