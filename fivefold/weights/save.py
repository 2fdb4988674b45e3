"""Writing a Hugging Face folder: safetensors, config.json, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.core.errors import WeightsError
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import export_config, stays_wide, stored_names, weight_names
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.check import listed
from fivefold.weights.shards import INDEX, SINGLE

CONFIG = "config.json"
GENERATION = "generation_config.json"
SHARD_BYTES = 5 << 30


def save_huggingface(
    folder: str | Path,
    weights: Decoder | Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model that `open_source` and transformers open, weights in `dtype`.

    `weights`: a decoder, or its parameters and buffers by our names. Files of more than
    `max_shard_bytes` are split, with an index. config.json comes last: a folder without it is not
    taken for a model.
    Raises WeightsError for parameters that do not belong to `config`, and when writing fails.
    """
    folder = Path(folder)
    state = _state(weights) if isinstance(weights, Decoder) else weights
    names = weight_names(config)
    _check(state, names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        stored = {name: stored_names(theirs, config) for name, theirs in names.items()}
        _write_weights(folder, state, stored, dtype, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(folder)
        _write_generation(folder, config)
        record = export_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        _write_json(folder / CONFIG, record)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"cannot write {folder}: {error}", "free some space, or choose another folder"
        ) from None


def _write_weights(
    folder: Path,
    state: Mapping[str, Tensor],
    names: Mapping[str, list[str]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shards = list(_shards({name: state[name] for name in names}, dtype, max_shard_bytes))
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for shard, file in zip(shards, files, strict=True):
        tensors = {
            theirs: value
            for name in shard
            for theirs, value in _stored(name, state[name], names[name], dtype).items()
        }
        partial = folder / f"{file}.partial"
        partial.touch()
        mode = partial.stat().st_mode  # the library's file would be its owner's alone
        # Written beside and renamed: tensors may be mapped from the very file that is replaced.
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        partial.replace(folder / file)
    stale = {path.name for path in folder.glob("model*.safetensors")} - set(files)
    for name in (*stale, INDEX):
        (folder / name).unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(state[name].numel() * dtype.itemsize for name in names)
        where = {
            theirs: file
            for shard, file in zip(shards, files, strict=True)
            for name in shard
            for theirs in names[name]
        }
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(
    state: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> Iterator[list[str]]:
    """Names in order, cut so that no file is larger, unless one tensor is."""
    shard: list[str] = []
    held = 0
    for name, value in state.items():
        size = value.numel() * dtype.itemsize
        if shard and held + size > max_shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    yield shard


def _state(decoder: Decoder) -> dict[str, Tensor]:
    return dict(decoder.named_parameters()) | dict(decoder.named_buffers())


def _stored(name: str, value: Tensor, stored: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """What a file holds of our tensor `name`: itself, or each of a stack of experts."""
    kept = torch.float32 if stays_wide(name) else dtype
    value = value.detach().to(device="cpu", dtype=kept).contiguous()
    if value.ndim == 3:
        return dict(zip(stored, value.unbind(), strict=True))
    (theirs,) = stored
    return {theirs: value}


def _check(state: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    missing = [name for name in names if name not in state]
    unknown = [name for name in state if name not in names]
    if missing or unknown:
        wrong = f"lack {listed(missing)}" if missing else f"have {listed(unknown)} besides"
        raise WeightsError(
            f"the weights to save {wrong}", "give the configuration that they belong to"
        )


def _write_generation(folder: Path, config: ModelConfig) -> None:
    """What the tokenizer said about ids that end a text, and else what the configuration says."""
    path = folder / GENERATION
    record = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    _write_json(path, {k: v for k, v in record.items() if v is not None} | known)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
