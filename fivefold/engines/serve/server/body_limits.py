"""Bodies that are too large or too deep are refused before anything reads them."""

from __future__ import annotations

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fivefold.engines.serve.server.api_errors import APIError

DEEPEST = 64
THREAD_BYTES = 1 << 16
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|[\[\]{}]', re.DOTALL)
"""A string that is not closed reaches to the end: each byte is read once, whatever is sent."""


class BodyLimits:
    """ASGI middleware: reads a body whole, and hands it on.

    `most` bytes at most, which must come within `seconds`.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app = app
        self.most = most
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, 408 or 400, or pass on."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
            if body is None:  # the client left
                return
            if len(body) > THREAD_BYTES:
                await asyncio.to_thread(check_depth, body)
            else:
                check_depth(body)
        except TimeoutError:
            error = APIError(408, f"the body did not come within {self.seconds:g} s")
            await error.response()(scope, receive, send)
            return
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most:
                raise APIError(
                    413, f"the body is larger than {self.most} bytes", code="request_too_large"
                )
            if not message.get("more_body", False):
                return b"".join(parts)


def check_depth(body: bytes) -> None:
    """Raise APIError for JSON nested deeper than `DEEPEST`."""
    if body.count(b"[") + body.count(b"{") <= DEEPEST:
        return
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(body):
        character = found[0][:1]
        if character in b"[{":
            depth += 1
        elif character in b"]}":
            depth -= 1
        if depth > DEEPEST:
            raise APIError(400, f"the JSON is nested deeper than {DEEPEST}", code="too_deep")
