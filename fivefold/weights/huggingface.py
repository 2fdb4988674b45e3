"""A Hugging Face folder: config.json, safetensors weights, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.model.families import is_stacked, parse_config, stored_names, weight_names
from fivefold.text import tokenizer_folder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.safetensors_file import SafetensorsFile
from fivefold.weights.shards import weight_files
from fivefold.weights.source import Entry, Kind, ModelSource

CONFIG = "config.json"

# How checkpoints spell the names of a decoder: plain; saved without its head; inside a multimodal
# model, in the order of transformers 4 and of 5.
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: name.removeprefix("model."),
    lambda name: f"language_model.{name}",
    lambda name: name.replace("model.", "model.language_model.", 1),
)
# Parts of checkpoints that a decoder can do without: tables that are computed, other modalities.
_PASSED_OVER = ("rotary_emb.inv_freq",)
_OTHER_MODALITIES = tuple(
    f"{inside}{part}."
    for inside in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)


class HuggingFaceSource(ModelSource):
    """Reads what `transformers` writes; see `save` for the way back."""

    def __init__(self, folder: Path, kind: Kind = "huggingface") -> None:
        self.kind = kind
        self._raw = read_config_file(folder / CONFIG)
        super().__init__(folder, parse_config(self._raw))

    @property
    def has_weights(self) -> bool:
        """Also opens their headers. Raises WeightsError for damaged ones, and for pickles."""
        return bool(self._files)

    @property
    def has_tokenizer(self) -> bool:
        """True where the folder has a tokenizer.json."""
        return tokenizer_folder.has_tokenizer(self.path)

    def entries(self) -> Mapping[str, Entry]:
        """Tensors by our names, in the order of the files."""
        return self._found

    def strangers(self) -> list[str]:
        """Tensors that neither the decoder has nor can do without."""
        known = {stored.name for part in self._parts.values() for stored in part}
        return [
            name
            for file in self._files.values()
            for name in file.placed
            if name not in known and not self._is_passed_over(name)
        ]

    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """One tensor, a private mapping of its file where nothing is converted or stacked."""
        parts = self._parts[name]
        if name not in self._stacks:
            return self._files[parts[0].file].read(parts[0].name, dtype, device)
        first = self._files[parts[0].file].read(parts[0].name, dtype, device)
        stack = first.new_empty(len(parts), *first.shape)
        for place, entry in zip(stack, parts, strict=True):
            place.copy_(self._files[entry.file].read(entry.name, dtype, device))
        return stack

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder. Raises TokenizerError."""
        return Tokenizer.from_folder(self.path)

    @cached_property
    def _files(self) -> dict[Path, SafetensorsFile]:
        files = {}
        for path, promised in weight_files(self.path).items():
            file = SafetensorsFile(path)
            absent = [name for name in promised or () if name not in file.placed]
            if absent:
                raise WeightsError(
                    f"{path} lacks {absent[0]}, which the index places there",
                    "copy it again from the model's origin",
                )
            files[path] = file
        return files

    @cached_property
    def _found(self) -> dict[str, Entry]:
        """By our names. A stack of experts goes by its first one's name and file."""
        found = {}
        for name, parts in self._parts.items():
            first = parts[0]
            odd = next((part for part in parts if part.shape != first.shape), None)
            if odd is not None:
                raise WeightsError(
                    f"{odd.name} in {odd.file} has shape {list(odd.shape)}, "
                    f"but {first.name} has {list(first.shape)}",
                    "copy it again from the model's origin",
                )
            shape = (len(parts), *first.shape) if name in self._stacks else first.shape
            found[name] = Entry(first.name, first.file, shape)
        return found

    @cached_property
    def _parts(self) -> dict[str, list[Entry]]:
        """What is stored of each of our tensors, in the order of the files; see `stored_names`.

        A stack of experts is there when all of them are.
        """
        spelling = self._spelling()
        placed = {
            name: Entry(name, file.path, place.shape)
            for file in self._files.values()
            for name, place in file.placed.items()
        }
        wanted = {
            ours: [spelling(stored) for stored in stored_names(theirs, self.config)]
            for ours, theirs in weight_names(self.config).items()
        }
        parts = {
            ours: [placed[name] for name in names]
            for ours, names in wanted.items()
            if all(name in placed for name in names)
        }
        order = {name: index for index, name in enumerate(placed)}
        return dict(sorted(parts.items(), key=lambda item: order[item[1][0].name]))

    @cached_property
    def _stacks(self) -> frozenset[str]:
        names = weight_names(self.config).items()
        return frozenset(ours for ours, theirs in names if is_stacked(theirs))

    def _spelling(self) -> Callable[[str], str]:
        """The way of naming under which the embedding is found; the plain one when under none."""
        embedding = weight_names(self.config)["embedding.weight"]
        names = {name for file in self._files.values() for name in file.placed}
        return next((s for s in _SPELLINGS if s(embedding) in names), _SPELLINGS[0])

    def _is_passed_over(self, name: str) -> bool:
        if self.config.tie_embeddings and name.endswith("lm_head.weight"):
            return True  # the embedding once more
        if self._raw.get("model_type") == "gemma3" and name.startswith(_OTHER_MODALITIES):
            return True
        more = self._raw.get("num_nextn_predict_layers") or 0
        first = self.config.num_layers
        if name.startswith(tuple(f"model.layers.{first + i}." for i in range(more))):
            return True  # DeepSeek's layers for predicting several tokens
        return name.endswith(_PASSED_OVER)


class ConfigSource(ModelSource):
    """A config.json alone: a model that can be planned, or trained from random values."""

    kind: Kind = "huggingface"
    has_weights = False
    has_tokenizer = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, parse_config(read_config_file(path)))

    def entries(self) -> Mapping[str, Entry]:
        """None."""
        return {}

    def get(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Raises WeightsError."""
        raise WeightsError(f"{self.path} is a configuration without weights", "give its folder")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the file, if there is one. Raises TokenizerError."""
        return Tokenizer.from_folder(self.path.parent)


def read_config_file(path: Path) -> dict[str, Any]:
    """A config.json. Raises WeightsError naming it when it is missing or no JSON object."""
    if not path.is_file():
        found = sorted(path.parent.glob("*.gguf"))
        mend = f"give the file: {found[0]}" if found else "give a Hugging Face model folder"
        raise WeightsError(f"{path.parent} has no {path.name}", mend)
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} is no JSON: {error}", "copy it again from the model's origin"
        ) from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object", "copy it again from the model's origin")
    return value
