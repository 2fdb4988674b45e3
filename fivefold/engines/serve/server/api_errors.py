"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response

from fivefold.core.errors import FivefoldError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class JSON(Response):
    """A JSON body. What cannot be written as UTF-8 (half a surrogate pair) becomes `?`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class APIError(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": found}

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, where known."""
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}

    def response(self) -> Response:
        """The whole answer."""
        return JSON(self.body(), self.status, self.headers())


def bad_request(error: FivefoldError, param: str | None = None) -> APIError:
    """What the model cannot take. The parameter at fault begins the message, if one does."""
    message = str(error)
    if param is None:
        name, found, _ = message.partition("=")
        param = name if found and name.isidentifier() else None
    return APIError(400, message, param=param)


def unsupported(param: str, why: str) -> APIError:
    """A field that OpenAI knows and this server does not honour."""
    return APIError(
        400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter"
    )
