"""From a recipe or YAML file and `--set` overrides to one RunConfig, with every value's origin.

Later sources win: defaults, then the recipe or file, then `--layout`, then `--set` in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from fivefold.core.config import RunConfig
from fivefold.core.errors import ConfigError, nearest
from fivefold.core.layout import parse_assignments


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for each dotted leaf key that was given, who gave it."""

    config: RunConfig
    origins: dict[str, str]
    name: str

    def origin(self, key: str) -> str:
        """Where the value of dotted `key` came from: the nearest given key at or above it."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "default"


def resolve(source: str, *, layout: str | None = None, sets: Iterable[str] = ()) -> Resolved:
    """Read `source` (a recipe's name or a YAML file), apply overrides, validate.

    Raises ConfigError for unknown keys (naming the nearest), wrong types, unreadable files,
    and LayoutError for a malformed layout.
    """
    values, origin, name = _read_source(source)
    origins = dict.fromkeys(flatten(values), origin)
    if layout is not None:
        values["layout"] = {**values.get("layout", {}), **parse_assignments(layout)}
        origins |= dict.fromkeys((f"layout.{k}" for k in parse_assignments(layout)), "--layout")
    for text in sets:
        key, value = _parse_set(text)
        _assign(values, key.split("."), value, key)
        origins = {k: v for k, v in origins.items() if not k.startswith(f"{key}.")}
        origins[key] = "--set"
    return Resolved(build(values), origins, name)


def build(values: Mapping[str, Any]) -> RunConfig:
    """Validate a nested mapping. Raises ConfigError with one line for the first fault."""
    _refuse_unknown(values, RunConfig, "")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("fivefold.recipes")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to dotted leaf keys; lists are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice: the first would be silently ignored."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_source(source: str) -> tuple[dict[str, Any], str, str]:
    if source in recipes():
        text = (resources.files("fivefold.recipes") / f"{source}.yaml").read_text("utf-8")
        return _parse_yaml(text, source), f"recipe {source}", source
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        raise ConfigError(f"no recipe or file named {source!r}", nearest(source, recipes()))
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml")))
        raise ConfigError(f"configuration file {path} does not exist", near) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read configuration file {path}: {error}") from None
    return _parse_yaml(text, str(path)), f"file {path}", path.stem


def _parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds no objects
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}{line}: {problem}", "mend the YAML") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds no mapping", "write `section: {key: value}`")
    return values


def _parse_set(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text!r} is not KEY=VALUE", "write e.g. --set train.steps=200")
    try:
        return key.strip(), yaml.safe_load(value) if value else ""
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: {value!r} is not a YAML value", "quote it") from None


def _assign(values: dict[str, Any], path: list[str], value: Any, whole: str) -> None:
    at: Any = values
    for position, part in enumerate(path):
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise ConfigError(f"--set {whole}: {part!r} is no index of a list of {len(at)}")
            slot: Any = int(part)
        else:
            slot = part
        if position == len(path) - 1:
            at[slot] = value
        else:
            below = at[slot] if isinstance(at, list) else at.get(slot)
            if not isinstance(below, dict | list):
                below = at[slot] = {}
            at = below


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that a field's annotation may hold, looking through Annotated/tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, tuple, list):
        return [m for a in get_args(annotation) for m in _sections(a)]
    return []


def _refuse_unknown(values: Any, section: type[BaseModel], prefix: str) -> None:
    if isinstance(values, list | tuple):
        for index, value in enumerate(values):
            _refuse_unknown(value, section, f"{prefix}{index}.")
        return
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key not in section.model_fields:
            raise ConfigError(f"unknown key {prefix}{key}", _nearest_key(str(key), section, prefix))
        for below in _sections(section.model_fields[key].annotation):
            _refuse_unknown(value, below, f"{prefix}{key}.")


def _nearest_key(key: str, section: type[BaseModel], prefix: str) -> str:
    """The nearest name in the section, else the same name anywhere in the configuration."""
    near = nearest(key, section.model_fields)
    if near.startswith("did you mean"):
        return near.replace("'", f"'{prefix}", 1)
    elsewhere = [k for k in _all_keys(RunConfig) if k.rpartition(".")[2] == key]
    return f"did you mean {elsewhere[0]!r}?" if elsewhere else near


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, info in section.model_fields.items():
        below = _sections(info.annotation)
        keys += _all_keys(below[0], f"{prefix}{name}.") if below else [f"{prefix}{name}"]
    return keys


def _explain(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    problem = problem[0].lower() + problem[1:]
    if first["type"] == "missing":
        return ConfigError(f"{where} is missing", f"add `{where}:` to the file, or --set {where}=…")
    given = first.get("input")
    shown = f" (given: {given!r})" if where and not isinstance(given, Mapping) else ""
    return ConfigError(f"{where}: {problem}{shown}" if where else problem)


def describe_keys(
    section: type[BaseModel] = RunConfig, prefix: str = ""
) -> list[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every configuration key."""
    rows: list[tuple[str, Any, str]] = []
    for name, info in section.model_fields.items():
        below = _sections(info.annotation)
        if below:
            rows += describe_keys(below[0], f"{prefix}{name}.")
        else:
            default = "required" if info.is_required() else info.default
            rows.append((f"{prefix}{name}", default, info.description or ""))
    return rows
