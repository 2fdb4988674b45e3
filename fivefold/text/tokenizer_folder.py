"""The tokenizer files of a Hugging Face folder, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from fivefold.core.errors import TokenizerError, one_line

PIPELINE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ROLES = "special_tokens_map.json"  # older folders keep the special tokens' roles here
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
CONFIG = "config.json"

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
# What other releases wrote, and would read into a class of their own.
_NOT_KEPT = ("chat_template", "tokenizer_class", "added_tokens_decoder", "auto_map", "backend")
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class Parts:
    """What `Tokenizer` is made of."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    stop_ids: Sequence[int]
    chat_template: str | None
    settings: Mapping[str, Any]


def has_tokenizer(folder: Path) -> bool:
    """True where `read` finds a tokenizer to read."""
    return (folder / PIPELINE).is_file()


def read(folder: Path) -> Parts:
    """Read a folder's tokenizer. Raises TokenizerError naming the file that is wrong."""
    if not has_tokenizer(folder):
        raise _missing(folder)
    path = folder / PIPELINE
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the Rust library raises plain Exception
        raise TokenizerError(
            f"{path} is no tokenizer: {one_line(error)}",
            "copy it again from the model's origin",
        ) from None
    settings = _read_json(folder / SETTINGS)
    roles = _read_json(folder / ROLES) | settings
    special = {role: _text_of(roles[role]) for role in SPECIAL if roles.get(role)}
    return Parts(
        backend,
        {role: token for role, token in special.items() if backend.token_to_id(token) is not None},
        _stop_ids(folder),
        _chat_template(folder, settings),
        {k: v for k, v in settings.items() if k not in (*SPECIAL, *_NOT_KEPT)},
    )


def write(folder: Path, parts: Parts) -> None:
    """Write a folder that `read`, and transformers' AutoTokenizer, open as the same tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PIPELINE).write_text(parts.backend.to_str(pretty=True), "utf-8")
    # The class that takes tokenizer.json as it is; others build a pipeline of their own.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= dict(parts.settings) | dict(parts.special_tokens)
    if parts.chat_template is not None:
        settings["chat_template"] = parts.chat_template
    _write_json(folder / SETTINGS, settings)
    _write_json(folder / GENERATION, _generation(parts))


def _generation(parts: Parts) -> dict[str, Any]:
    """The ids that start, end and pad a text, where generation looks for them."""
    ids = {
        role: parts.backend.token_to_id(token)
        for role, token in parts.special_tokens.items()
        if role in ("bos_token", "pad_token")
    }
    stops = list(parts.stop_ids)
    found = {f"{role}_id": value for role, value in ids.items()}
    return found | ({"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {})


def _stop_ids(folder: Path) -> list[int]:
    """Ids that end an answer: generation_config.json's, else config.json's."""
    for name in (GENERATION, CONFIG):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return [int(i) for i in (ids if isinstance(ids, list) else [ids])]
    return []


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name: [{"name": …, "template": …}]
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def _text_of(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(
            f"{path} is no JSON: {error}", "copy it again from the model's origin"
        ) from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is no JSON object", "copy it again from the model's origin")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _missing(folder: Path) -> TokenizerError:
    if not folder.is_dir():
        return TokenizerError(f"there is no folder {folder}", "give a folder with tokenizer.json")
    others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    if others:
        return TokenizerError(
            f"{folder} has no {PIPELINE}, only {', '.join(others)}, which is not read",
            "write it with transformers: AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER)",
        )
    return TokenizerError(
        f"{folder} has no tokenizer (looked for {', '.join((PIPELINE, *_OTHER_FORMATS))})",
        f"copy {PIPELINE} and {SETTINGS} from the model's origin into it",
    )
