"""Which JSON schemas can be held to, and what they say in words that XGrammar reads.

XGrammar passes over keywords that it does not know, and over those beside `$ref`, `anyOf` and the
like. An answer must never be promised a form that it was not held to, so such schemas are refused.
A schema may be narrowed: whatever fits the narrower one fits the one that was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fivefold.core.errors import PromptError

MOST_LEVELS = 48
# What each type of value may be asked.
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    }),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    }),
}  # fmt: skip
# Each says by itself what a value may be.
DECIDING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "additionalItems", "nullable", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
ASSERTING = frozenset().union(*KEYWORDS.values())
KNOWN = ASSERTING | REFUSED | {"type", "uniqueItems", "$defs", "definitions", *DECIDING}
TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "object": dict, "array": list,
}  # fmt: skip


def held(schema: Any, where: str = "the schema", level: int = 0) -> Any:
    """The schema, or a narrower one, all of which XGrammar holds answers to.

    Raises PromptError naming the place and the keyword otherwise.
    """
    if level > MOST_LEVELS:
        raise _refused(where, f"lies more than {MOST_LEVELS} levels deep", "name parts by $defs")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _refused(where, f"is {str(schema)[:40]!r}", "write an object")
    _check_keywords(schema, where)
    found = dict(schema)
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        if name in found:
            found[name] = _each(found[name], f"{where}.{name}", level)
    for name in ("items", "additionalProperties", "propertyNames"):
        if name in found:
            found[name] = held(found[name], f"{where}.{name}", level + 1)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if name in found:
            found[name] = _several(found[name], f"{where}.{name}", level)
    if any(name in found for name in DECIDING):
        _check_deciding(found, where)
    else:
        _say_type(found, where)
    _check_string(found, where)
    return _with_required(found, where) if "required" in found else found


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    for name in schema:
        if name in REFUSED or (name == "uniqueItems" and schema[name]):
            raise _refused(where, f"has {name}, which answers cannot be held to", "leave it out")
        if name not in KNOWN and (near := difflib.get_close_matches(name, KNOWN, 1, 0.8)):
            raise _refused(where, f"has {name}", f"did you mean {near[0]}?")


def _each(schemas: Any, where: str, level: int) -> dict[str, Any]:
    if not isinstance(schemas, dict):
        raise _refused(where, "is no object", "give a schema for each name")
    return {name: held(s, f"{where}.{name}", level + 1) for name, s in schemas.items()}


def _several(schemas: Any, where: str, level: int) -> list[Any]:
    if not isinstance(schemas, list) or not schemas:
        raise _refused(where, "is no list of schemas", "give at least one")
    return [held(s, f"{where}[{i}]", level + 1) for i, s in enumerate(schemas)]


def _check_deciding(schema: dict[str, Any], where: str) -> None:
    """One keyword decides, and nothing beside it would be passed over."""
    deciding = [name for name in DECIDING if name in schema]
    beside = [name for name in schema if name in ASSERTING] + deciding[1:]
    if "type" in schema and deciding[0] not in ("enum", "const"):
        beside.append("type")
    if beside:
        raise _refused(
            where, f"has {beside[0]} beside {deciding[0]}", f"put it inside of {deciding[0]}"
        )
    if len(schema.get("allOf", "1")) > 1:
        raise _refused(where, "has allOf of several schemas", "write them as one")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _refused(where, f"refers to {reference!r}", "refer to $defs of the same schema")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(values, list):
        raise _refused(where, f"has enum {values!r}", "give a list of values")
    wrong = [v for v in values if "type" in schema and not _is_of(v, schema["type"])]
    if wrong:
        raise _refused(where, f"has the value {wrong[0]!r}, which is not of its type", "drop it")


def _is_of(value: Any, types: Any) -> bool:
    names = [types] if isinstance(types, str) else types
    known = [TYPES[name] for name in names if name in TYPES]
    if isinstance(value, bool):
        return bool in known
    return any(isinstance(value, kind) for kind in known if kind is not bool)


def _say_type(schema: dict[str, Any], where: str) -> None:
    """What is asked of strings alone is asked of a string."""
    asked = [kind for kind, names in KEYWORDS.items() if names & schema.keys()]
    if "type" in schema or not asked:
        return
    if len(asked) > 1:
        raise _refused(where, f"asks for {'s and '.join(asked)}s alike", "give it a type")
    schema["type"] = asked[0]


def _check_string(schema: dict[str, Any], where: str) -> None:
    ways = [n for n in ("pattern", "format", "minLength", "maxLength") if n in schema]
    if len(ways) > 1 and ways != ["minLength", "maxLength"]:
        raise _refused(where, f"has {ways[0]} beside {ways[1]}", "say both in one pattern")


def _with_required(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Required members are named among the properties: others would be passed over."""
    names, properties = schema["required"], dict(schema.get("properties", {}))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refused(where, f"has required {names!r}", "give a list of names")
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    for name in names:
        if name in properties:
            continue
        if others is False or "patternProperties" in schema or "propertyNames" in schema:
            raise _refused(where, f"requires {name!r}", "list it among its properties")
        properties[name] = others
    return {**schema, "properties": properties}


def _refused(where: str, what: str, mend: str) -> PromptError:
    return PromptError(f"{where} {what}", mend)
