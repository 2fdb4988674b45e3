"""Traffic that behaves badly: clients that leave, wrong requests, answers that must be right."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.unit.serve.server.real_server import NAME

SEED = 20
SHARED = "Once upon a time there was a frog who lived in a small pond. "
PROMPTS = [
    SHARED, SHARED + "It sang.", SHARED * 3, SHARED * 3 + "One day", "def main() -> None:\n",
    "Žluťoučký kůň", "你好，世界！" * 4, "a", [5, 6, 7], [9] * 70, list(range(100, 160)),
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0, "max_tokens": 3, "ignore_eos": True},
    {"temperature": 0.9, "seed": 7, "max_tokens": 16, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "max_tokens": 60, "n": 2, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 90, "ignore_eos": True, "repetition_penalty": 1.3},
    {"temperature": 0, "max_tokens": 30, "stop": ["e", "frog"]},
]
WRONG: list[dict[str, Any]] = [
    {"temperature": -1}, {"prompt": [400]}, {"prompt": "x " * 5000}, {"max_tokens": "many"},
    {"unheard": 1}, {"n": 0}, {"model": "other"}, {"prompt": None}, {"logit_bias": {"a": 1}},
]  # fmt: skip
BAD_STATUS = {400, 404}
STREAM_SECONDS = 120


def asks() -> list[dict[str, Any]]:
    """Every request whose answer is compared."""
    return [{"model": NAME, "prompt": p, **s} for p in PROMPTS for s in SETTINGS]


@dataclass
class Soak:
    """Sends requests to one server, several at once. `wrong` tells what should not have been."""

    url: str
    expected: Mapping[str, list[str]]
    random: random.Random = field(default_factory=lambda: random.Random(SEED))
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, requests: int, at_once: int) -> None:
        """This many requests."""
        left = iter(range(requests))
        timeout = aiohttp.ClientTimeout(total=STREAM_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def work() -> None:
                for _ in left:
                    await self._one(session)

            await asyncio.gather(*(work() for _ in range(at_once)))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kinds = [
            self._whole,
            self._stream,
            self._leave_stream,
            self._give_up,
            self._bad,
            self._half,
        ]
        (act,) = self.random.choices(kinds, weights=[34, 34, 12, 8, 8, 4])
        ask = self.random.choice(asks())
        try:
            await act(session, ask)
        except Exception as error:
            self.wrong.append(f"{act.__name__} {ask}: {type(error).__name__}: {error}")

    async def _whole(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        async with session.post(f"{self.url}/v1/completions", json=ask) as answer:
            if await self._refused(answer):
                return
            body = await answer.json()
            assert answer.status == 200, body
        self._compare(ask, [choice["text"] for choice in body["choices"]])

    async def _stream(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        texts = [""] * ask.get("n", 1)
        async with session.post(
            f"{self.url}/v1/completions", json={**ask, "stream": True}
        ) as answer:
            if await self._refused(answer):
                return
            last = b""
            async for line in answer.content:
                last = line.strip() or last
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
            assert last == b"data: [DONE]", last
        self._compare(ask, texts)

    async def _leave_stream(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        wanted = self.random.randrange(5)
        async with session.post(
            f"{self.url}/v1/completions", json={**ask, "stream": True}
        ) as answer:
            if await self._refused(answer):
                return
            async for line in answer.content:
                wanted -= bool(line.strip())
                if wanted < 0:
                    break
            answer.close()
        self.seen["left a stream"] += 1

    async def _give_up(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.random.random() * 0.05):
                await self._whole(session, ask)
        except TimeoutError:
            self.seen["gave up"] += 1

    async def _bad(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        body = {**ask, **self.random.choice(WRONG)}
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status in BAD_STATUS, (answer.status, body)
            assert (await answer.json())["error"]["message"]
        self.seen["refused"] += 1

    async def _half(self, session: aiohttp.ClientSession, ask: dict[str, Any]) -> None:
        """Half a request, then nobody."""
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        data = json.dumps(ask).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data[: self.random.randrange(len(data))])
        await writer.drain()
        writer.close()
        self.seen["half a request"] += 1

    async def _refused(self, answer: aiohttp.ClientResponse) -> bool:
        """Whether the queue was full; then a moment later."""
        if answer.status != 429:
            return False
        assert int(answer.headers["Retry-After"]) >= 1
        self.seen["queue full"] += 1
        await asyncio.sleep(0.1)
        return True

    def _compare(self, ask: dict[str, Any], texts: list[str]) -> None:
        self.seen["answered"] += 1
        assert texts == self.expected[json.dumps(ask)], texts
