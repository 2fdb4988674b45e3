"""One line about the first thing that is wrong with a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.core.errors import nearest
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.chat_protocol import ChatRequest
from fivefold.engines.serve.server.protocol import CompletionRequest

SHOWN = 60
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})


def explain(errors: Sequence[Mapping[str, Any]], body: Any) -> APIError:
    """From pydantic's list of errors."""
    error = errors[0]
    path = [part for part in error["loc"] if part != "body"]
    param = _dotted(path)
    kind, told = error["type"], error["msg"]
    if kind == "json_invalid":
        why = error.get("ctx", {}).get("error", "")
        return APIError(400, f"the body is no JSON: {why}".rstrip(": "), code="invalid_json")
    if not path:
        return APIError(400, "the body must be a JSON object, with Content-Type: application/json")
    if kind == "missing":
        return APIError(
            400, f"missing required parameter: {param}", param=param, code="missing_parameter"
        )
    if kind == "extra_forbidden":
        mend = f"; {nearest(param, FIELDS)}" if len(path) == 1 else ""
        return APIError(
            400, f"unknown parameter: {param}{mend}", param=param, code="unknown_parameter"
        )
    what = told.removeprefix("Input ").removeprefix("Value error, ")
    given = "" if isinstance(error.get("input"), dict | list) else f", not {_shown(error)}"
    return APIError(400, f"{param} {what}{given}", param=param, code="invalid_value")


def _dotted(path: Sequence[Any]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(error: Mapping[str, Any]) -> str:
    text = repr(error.get("input"))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
