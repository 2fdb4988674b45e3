"""The form of an answer that a request asks for: `response_format`, `structured_outputs`, tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fivefold.core.errors import PromptError, nearest
from fivefold.engines.serve.server.api_errors import APIError, bad_request, unsupported
from fivefold.engines.serve.server.parsers.tool_calls import CallFormat
from fivefold.engines.serve.structured.form import StructuredOutputs

NAMES = [field.name for field in fields(StructuredOutputs)]
SCHEMA_FIELDS = ("name", "schema", "strict", "description")


def answer_form(response_format: Any, structured_outputs: Any) -> StructuredOutputs | None:
    """What both fields say together. Raises APIError naming the one that is wrong."""
    told = _of_response_format(response_format)
    if structured_outputs is None:
        return told
    if told is not None:
        raise APIError(
            400, "response_format and structured_outputs are one thing; give one",
            param="structured_outputs",
        )  # fmt: skip
    return _of_fields(structured_outputs)


def _of_response_format(given: Any) -> StructuredOutputs | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            return _of_schema(given.get("json_schema"))
    raise APIError(
        400, f"response_format.type is {kind!r}; use text, json_object or json_schema",
        param="response_format",
    )  # fmt: skip


def _of_schema(given: Any) -> StructuredOutputs:
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise APIError(
            400, "response_format.json_schema needs a schema, an object", param="response_format"
        )
    for name in given:
        if name not in SCHEMA_FIELDS:
            raise APIError(
                400, f"unknown response_format.json_schema.{name}; {nearest(name, SCHEMA_FIELDS)}",
                param="response_format",
            )  # fmt: skip
    return _made("response_format", json=given["schema"])


def _of_fields(given: Mapping[str, Any]) -> StructuredOutputs:
    for name in given:
        if name not in NAMES:
            raise APIError(
                400, f"unknown structured_outputs.{name}; {nearest(name, NAMES)}",
                param="structured_outputs",
            )  # fmt: skip
    return _made("structured_outputs", **given)


def _made(param: str, **given: Any) -> StructuredOutputs:
    try:
        return StructuredOutputs(**given)
    except PromptError as error:
        raise bad_request(error, param) from None


def calls_form(
    form: CallFormat, tools: Sequence[Mapping[str, Any]], choice: Any, several: bool
) -> StructuredOutputs | None:
    """Calls in the model's own marks; None where the model is free to write what it likes.

    tools: the functions. choice: auto, required, or a named one. several: more than one call may
    come. A call's arguments are of its function's schema; with auto, of those that are strict.
    """
    if choice in (None, "auto"):
        if not any(tool.get("strict") for tool in tools):
            return None
        if form.bare:
            raise unsupported(
                "tools.function.strict",
                "calls of this model have no mark; use tool_choice=required",
            )
        tags = [_tag(form, tool, bool(tool.get("strict"))) for tool in tools]
        free: dict[str, Any] = {"type": "triggered_tags", "triggers": [form.opening], "tags": tags}
        return _tagged({**free, "at_least_one": False, "stop_after_first": not several})
    if choice != "required":
        tools = [_named(tools, choice)]
    if form.bare:
        schemas = [_call(form, tool, True) for tool in tools]
        return _tagged({"type": "json_schema", "json_schema": {"anyOf": schemas}})
    tags = [_tag(form, tool, True) for tool in tools]
    calls: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
    return _tagged(
        {**calls, "at_least_one": True, "stop_after_first": not several or choice != "required"}
    )


def _tagged(format: dict[str, Any]) -> StructuredOutputs:
    tag = json.dumps({"type": "structural_tag", "format": format})
    return _made("tools", structural_tag=tag)


def _named(tools: Sequence[Mapping[str, Any]], choice: Any) -> Mapping[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if name is not None and tool["name"] == name:
            return tool
    known = nearest(str(name), [tool["name"] for tool in tools])
    raise APIError(400, f"tool_choice names no tool; {known}", param="tool_choice")


def _tag(form: CallFormat, tool: Mapping[str, Any], held: bool) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f"{form.opening}\n",
        "content": {"type": "json_schema", "json_schema": _call(form, tool, held)},
        "end": f"\n{form.closing}",
    }


def _call(form: CallFormat, tool: Mapping[str, Any], held: bool) -> dict[str, Any]:
    """The schema of a call's JSON."""
    arguments = (tool.get("parameters") if held else None) or {"type": "object"}
    key = "parameters" if form.bare else "arguments"
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }
