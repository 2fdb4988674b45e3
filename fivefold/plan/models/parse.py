"""A model from a few words: a file, the name of a published one, a size, or its numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.errors import PlanError, nearest, one_line
from fivefold.core.resolve import recipes, resolve
from fivefold.plan.models.gpt import gpt_names, published_gpt
from fivefold.plan.models.published import ALIASES, PUBLISHED
from fivefold.plan.models.sizes import KNOWN, from_numbers, from_size, is_size
from fivefold.plan.models.translate import from_config
from fivefold.plan.shape import ModelShape

# What names of repositories add to that of the model.
TAILS = re.compile(
    r"[-_.](hf|base|instruct|chat|it|pt|fp8|fp4|nvfp4|bf16|int4|int8|awq|gptq|gguf|v0\.[0-9]|2507|0528)$"
)


def names() -> tuple[str, ...]:
    """The published models that are known by name."""
    return (*PUBLISHED, *gpt_names())


def shape(text: str | Path) -> ModelShape:
    """The model that `text` means.

    A config.json or a folder with one; a training configuration (YAML) of fivefold; a GGUF file or
    a checkpoint; a recipe; a published model (`llama-3.1-70b`, `meta-llama/Llama-3.1-70B-Instruct`, `gpt-3`);
    a size (`13B`); or numbers (`layers=32,hidden=4096,heads=32,kv=8`). Raises PlanError saying what
    is wrong with it: the field that is missing, the model type that is not known, names that are
    close.
    """
    text = str(text).strip()
    path = Path(text).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return _from_json(path / "config.json", path.resolve().name)
    if path.suffix == ".json" and (path.is_file() or "/" in text):
        return _from_json(path, path.stem if path.stem != "config" else path.resolve().parent.name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return _from_recipe(path)
    if path.exists():
        return _from_source(path)
    if is_size(text):
        known = KNOWN.get(text.lower().replace(" ", ""))
        return replace(published(known), name=text.upper()) if known else from_size(text)
    if "=" in text:
        return from_numbers(text)
    found = find(text)
    if found is None and text in recipes():
        return _of_recipe(text)
    if found is None:
        raise PlanError(f"there is no model {text!r}", _close(text))
    return published(found)


def find(text: str) -> str | None:
    """The published model that a name or a repository's name means."""
    plain = text.strip().lower().rsplit("/", 1)[-1]
    while True:
        for candidate in (plain, plain.removeprefix("meta-")):
            found = _BY_PLAIN_NAME.get(_plain(candidate))
            if found is not None:
                return found
        shorter = TAILS.sub("", plain)
        if shorter == plain:
            return None
        plain = shorter


@lru_cache(maxsize=64)
def published(name: str) -> ModelShape:
    """A published model by its exact name."""
    if name in PUBLISHED:
        config, source = PUBLISHED[name]
        return from_config(config, name, source)
    return published_gpt(name)


def _from_json(path: Path, name: str) -> ModelShape:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", "give a config.json") from error
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {one_line(error)}", "give a config.json") from error
    if not isinstance(found, dict):
        raise PlanError(f"{path} holds no model's config", "give a Hugging Face config.json")
    return from_config(found, name or str(path), str(path))


def _from_recipe(path: Path) -> ModelShape:
    """The model of a YAML that `fivefold train` reads: its `model`, or a config.json as YAML."""
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PlanError(f"cannot read {path}: {one_line(error)}", "give a config.json") from error
    if not isinstance(found, dict):
        raise PlanError(f"{path} holds no model", "give `model:` or a config.json")
    return _of_model(found.get("model", found), path.stem, str(path))


def _of_recipe(name: str) -> ModelShape:
    """The model of a recipe that comes with the package."""
    model = resolve(name).config.model
    return _of_model(model.source or {"config": model.config}, name, f"recipe {name}")


def _of_model(model: Any, name: str, source: str) -> ModelShape:
    if isinstance(model, str):
        return shape(model)
    if isinstance(model, dict):
        if isinstance(model.get("source"), str):
            return shape(model["source"])
        return from_config(model.get("config") or model, name, source)
    raise PlanError(f"`model` of {source} is {model!r}", "give a name, or `config:` with its keys")


def _from_source(path: Path) -> ModelShape:
    """A GGUF file, a llama2.c file, a checkpoint or a run: what the weights themselves say."""
    from fivefold.weights.open import open_source

    return ModelShape(name=path.resolve().name, config=open_source(path).config, source=str(path))


def _close(text: str) -> str:
    if "/" in text or text.endswith((".json", ".gguf")):
        return (
            f"it is neither a file nor a published model; {nearest(text.rsplit('/')[-1], names())}"
        )
    family = re.match(r"[a-z]+", text.lower())
    same = [name for name in names() if family and name.startswith(family[0])]
    wanted = nearest(text.lower(), names())
    if wanted.startswith("did you mean") or not same:
        return wanted
    return f"known: {', '.join(same)}"


def _plain(name: str) -> str:
    """Letters, digits and points: a point tells gpt3-1.3b and gpt3-13b apart."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


_BY_PLAIN_NAME = {
    **{_plain(alias): name for alias, name in ALIASES.items()},
    **{_plain(name): name for name in names()},
}
