"""The application: routes, limits around them, and every error in OpenAI's shape."""

from __future__ import annotations

import logging
import re
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fivefold import __version__
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.body_limits import BodyLimits
from fivefold.engines.serve.server.drain import DrainGate
from fivefold.engines.serve.server.routes import (
    chat,
    completions,
    embeddings,
    models,
    tokens,
    watching,
)
from fivefold.engines.serve.server.routes.page import page_router
from fivefold.engines.serve.server.service import Service
from fivefold.engines.serve.server.sse import CLIENT_LEFT, ClientLeftError
from fivefold.engines.serve.server.validation import explain

log = logging.getLogger("fivefold.serve")
REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(rb"[\w.:-]{1,128}")


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


def make_app(service: Service) -> FastAPI:
    """The server for one service."""
    app = FastAPI(
        title="fivefold", version=__version__, docs_url=None, redoc_url=None,
        responses={"default": {"model": ErrorBody, "description": "An error"}},
    )  # fmt: skip
    app.state.service = service
    for module in (completions, chat, embeddings, models, tokens, watching):
        app.include_router(module.router)
    app.include_router(page_router())
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientLeftError, _client_left)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(BodyLimits, most=service.limits.body_bytes, seconds=service.limits.seconds)
    app.add_middleware(DrainGate, drain=service.drain)
    app.add_middleware(RequestIds)
    return app


async def _api_error(request: Request, error: Any) -> Response:
    found: Response = error.response()
    return found


async def _invalid(request: Request, error: Any) -> Response:
    return explain(error.errors(), error.body).response()


async def _http_error(request: Request, error: Any) -> Response:
    status = error.status_code
    message = error.detail
    if status == 404:
        message = f"there is nothing at {request.method} {request.url.path}"
    elif status == 405:
        message = f"{request.url.path} does not take {request.method}"
    answer = APIError(status, message).response()
    answer.headers.update(error.headers or {})
    return answer


async def _client_left(request: Request, error: Any) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _bug(request: Request, error: Any) -> Response:
    log.error("a request failed: %s %s", request.method, request.url.path)
    return APIError(500, "the server failed; see its log", code="bug").response()


class RequestIds:
    """ASGI middleware: each answer has the request's X-Request-Id, or one of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        id = given if _PLAIN_ID.fullmatch(given) else b"req-" + uuid.uuid4().hex.encode()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (REQUEST_ID, id)]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, tell)
