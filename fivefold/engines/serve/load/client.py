"""Sends requests and notes what became of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import aiohttp

from fivefold.core.errors import one_line
from fivefold.engines.serve.load.answer import AnswerReader, StreamError, error_message, shown
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.target import Target

Clock = Callable[[], float]
LISTING_SECONDS = 30


class Client:
    """Connections to one server, as many as there are requests at once."""

    def __init__(self, api_headers: dict[str, str], timeout: float) -> None:
        self._headers = api_headers
        self._timeout = timeout

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def models(self, base: str) -> list[str]:
        """Names that the server lists; none where it has no such list.

        Raises LoadError when it cannot be reached or wants another key.
        """
        limit = aiohttp.ClientTimeout(total=min(self._timeout, LISTING_SECONDS))
        try:
            async with self._session.get(f"{base}/v1/models", timeout=limit) as response:
                text = await response.read()
        except TimeoutError:
            raise LoadError(f"{base} does not answer", "check the server") from None
        except aiohttp.ClientError as error:
            raise LoadError(
                f"cannot reach {base}: {_reason(error)}", "is the server running there?"
            ) from None
        if response.status in (401, 403):
            raise LoadError(f"{base} refuses the key: {_said(text)}", "give --api-key")
        try:
            return [str(model["id"]) for model in json.loads(text)["data"]]
        except (ValueError, TypeError, KeyError):
            return []

    async def send(
        self, target: Target, body: bytes, outcome: Outcome, clock: Clock,
        on_token: Callable[[], None] = lambda: None,
    ) -> Outcome:  # fmt: skip
        """Post `body`, read the answer, fill `outcome`. Nothing is raised but cancellation."""
        reader = AnswerReader()
        outcome.sent = clock()
        try:
            await self._read(target, body, reader, clock, on_token)
        except StreamError as error:
            outcome.failure, outcome.detail = error.kind, error.detail
        except TimeoutError:
            outcome.failure, outcome.detail = "timeout", f"after {self._timeout:g} s"
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as error:
            outcome.failure, outcome.detail = "disconnected", one_line(error)
        except aiohttp.ClientConnectorError as error:
            outcome.failure, outcome.detail = "unreachable", _reason(error)
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure, outcome.detail = "connection lost", _reason(error)
        except BaseException:
            outcome.failure = "cancelled"
            raise
        finally:
            outcome.ended = clock()
            reader.fill(outcome)
        return outcome

    async def _read(
        self, target: Target, body: bytes, reader: AnswerReader, clock: Clock,
        on_token: Callable[[], None],
    ) -> None:  # fmt: skip
        async with self._session.post(target.address, data=body) as response:
            if response.status != 200:
                raise StreamError(f"status {response.status}", _said(await response.read()))
            if "event-stream" not in response.headers.get("Content-Type", ""):
                raise StreamError("bad stream", f"no stream: {shown(await response.read())}")
            async for data in response.content.iter_any():
                seen = reader.pieces
                reader.push(data, clock())
                for _ in range(reader.pieces - seen):
                    on_token()
            reader.finish(clock())


def _said(text: bytes) -> str:
    """What a refusal says."""
    try:
        body: Any = json.loads(text)
    except ValueError:
        return shown(text)
    return error_message(body)


def _reason(error: BaseException) -> str:
    """`Connection refused` rather than asyncio's words for it."""
    cause = getattr(error, "os_error", None) or error
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return one_line(getattr(cause, "strerror", None) or cause) or type(error).__name__
