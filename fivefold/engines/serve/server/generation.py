"""Answers to the prompts of one request, on their way: counted, timed, and ended in any case."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fivefold.engines.serve.completion import NO_TOKEN, Completion
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.engine_client import EngineClient
from fivefold.engines.serve.server.keys import Caller
from fivefold.engines.serve.server.messages import Update
from fivefold.engines.serve.server.service import Service


@dataclass(frozen=True, slots=True)
class Ask:
    """What the engines are to do for a request: a number of prompts, each with its settings."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    caller: Caller
    priority: int = 0
    salt: str = ""

    @property
    def tenant(self) -> str:
        """Whose cached prefixes may be used."""
        return f"{self.caller.tenant}\0{self.salt}" if self.salt else self.caller.tenant


class Generation:
    """Iterates over (place of the prompt, piece of an answer). Always `close` it."""

    def __init__(self, service: Service, ask: Ask) -> None:
        self.ask = ask
        self.completion_tokens = 0
        self.prompt_tokens = sum(len(prompt) for prompt in ask.prompts)
        self.cached_tokens = 0
        self._service = service
        self._began = time.monotonic()
        self._reason = "abort"
        self._queue: asyncio.Queue[tuple[int, Update | APIError]] = asyncio.Queue()
        self._tickets: dict[int, tuple[EngineClient, int]] = {}  # by place
        self._left = [params.candidates for params in ask.params]
        self._last: dict[tuple[int, int], tuple[float, float]] = {}  # first and latest token
        self._deadline = asyncio.get_running_loop().call_later(
            service.limits.seconds, self._queue.put_nowait, (0, _too_late(service.limits.seconds))
        )

    @classmethod
    async def start(cls, service: Service, ask: Ask) -> Generation:
        """All prompts accepted, or none. Raises APIError."""
        generation = cls(service, ask)
        try:
            async with asyncio.timeout(service.limits.seconds):
                for place in range(len(ask.prompts)):
                    await generation._submit(place)
        except TimeoutError:
            generation.close()
            raise _too_late(service.limits.seconds) from None
        except BaseException:
            generation.close()
            raise
        ask.caller.charge(generation.prompt_tokens)
        return generation

    async def _submit(self, place: int) -> None:
        prompt, params = self.ask.prompts[place], self.ask.params[place]
        client = self._service.pool.choose(prompt, self.ask.tenant)
        id = await client.submit(
            prompt,
            params,
            lambda piece: self._queue.put_nowait((place, piece)),
            priority=self.ask.priority,
            tenant=self.ask.tenant,
        )
        self._tickets[place] = client, id
        self._service.metrics.accepted(len(prompt), params.candidates, params.max_new_tokens)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, Update]:
        """The next piece. Raises APIError when the engine fails or the time is over."""
        if not any(self._left):
            raise StopAsyncIteration
        place, piece = await self._queue.get()
        if isinstance(piece, APIError):
            self._reason = "error"
            raise piece
        now = time.monotonic()
        if piece.token_id != NO_TOKEN:
            self._count(place, piece, now)
        if piece.completion is not None:
            self._end(place, piece.completion, now)
        return place, piece

    def close(self) -> None:
        """Free what still runs."""
        self._deadline.cancel()
        if self._tickets:
            self._service.metrics.cut_short(self._reason, sum(self._left))
        for client, id in self._tickets.values():
            client.abort(id)
        self._tickets.clear()

    def _count(self, place: int, piece: Update, now: float) -> None:
        self.completion_tokens += 1
        self.ask.caller.charge(1)
        key = (place, piece.index)
        first, latest = self._last.get(key, (now, self._began))
        self._service.metrics.token(now - latest, key not in self._last)
        self._last[key] = first, now

    def _end(self, place: int, completion: Completion, now: float) -> None:
        self._left[place] -= 1
        if not self._left[place]:
            client, id = self._tickets.pop(place)
            client.ended(id)
            self.cached_tokens += completion.cached_tokens
        first, latest = self._last.get((place, completion.index), (now, now))
        self._service.metrics.finished(
            completion.finish_reason, len(completion.token_ids), now - self._began, latest - first,
            completion.timings,
        )  # fmt: skip
        if completion.finish_reason == "error":
            raise APIError(500, f"the engine failed: {completion.stop_reason}", code="engine_error")


async def collect(generation: Generation) -> list[list[Completion]]:
    """All answers, for each prompt in the order of their indices."""
    found: list[list[Completion]] = [[] for _ in generation.ask.prompts]
    async for place, piece in generation:
        if piece.completion is not None:
            found[place].append(piece.completion)
    return [sorted(some, key=lambda completion: completion.index) for some in found]


def _too_late(seconds: float) -> APIError:
    return APIError(504, f"the answer took longer than {seconds:g} s", code="request_timeout")
