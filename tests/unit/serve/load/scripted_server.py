"""An OpenAI-like server that does what a script says, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

MODELS = ("tiny-one", "tiny-two")


@dataclass(frozen=True)
class Script:
    """How one request is answered: seconds before the first piece and between pieces."""

    first: float = 0.0
    between: float = 0.0
    tokens: int | None = None
    """Pieces; None: as many as were asked for."""
    tokens_a_piece: int = 1
    usage: bool = True
    cached: int | None = None
    status: int = 200
    said: str = "no"
    then: str = "done"
    """done, cut (no ending), gone (connection dropped), error (an error event), garbage, hang."""
    content_type: str = "text/event-stream"


def count_prompt(body: dict[str, Any]) -> int:
    """Tokens: ids, or 1.5 a word, and 7 around a chat."""
    if "messages" in body:
        return 7 + int(1.5 * len(body["messages"][0]["content"].split()))
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else int(1.5 * len(prompt.split()))


class ScriptedServer:
    """`script` decides for each body; `bodies` has all that came."""

    def __init__(self, script: Callable[[dict[str, Any]], Script] | None = None) -> None:
        self.script = script or (lambda body: Script())
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: tuple[str, ...] | None = MODELS
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drop all connections and listen no more; stopping twice is harmless."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _list(self, request: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=404, text="nothing here")
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        script = self.script(body)
        if script.status != 200:
            error = {"error": {"message": script.said, "type": "x", "code": None}}
            return web.json_response(error, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": script.content_type})
        await response.prepare(request)
        await self._stream(response, body, script)
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], script: Script
    ) -> None:
        async def write(chunk: object) -> None:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        chat = "messages" in body
        pieces = body["max_tokens"] if script.tokens is None else script.tokens
        if chat:
            await write({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(pieces):
            await asyncio.sleep(script.between if index else script.first)
            text = {"delta": {"content": "a "}} if chat else {"text": "a "}
            await write({"choices": [{"index": 0, **text, "finish_reason": None}]})
        if script.then == "hang":
            await asyncio.Event().wait()
        if script.then == "gone":
            assert response._req is not None and response._req.transport is not None
            response._req.transport.abort()
            return
        if script.then == "error":
            await write({"error": {"message": "the engine died", "type": "server_error"}})
        if script.then == "garbage":
            await response.write(b"data: {oh\n\n")
        if script.then != "done":
            return
        empty = {"delta": {}} if chat else {"text": ""}
        await write({"choices": [{"index": 0, **empty, "finish_reason": "length"}]})
        if script.usage:
            usage: dict[str, Any] = {
                "prompt_tokens": count_prompt(body),
                "completion_tokens": pieces * script.tokens_a_piece,
            }
            if script.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached}
            await write({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
