"""A checkpoint as a source of weights: which folder a path means, and what comes out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import make_checkpointer, make_state

from fivefold.core.errors import CheckpointError
from fivefold.weights.checkpoint_place import is_checkpoint, resolve_checkpoint
from fivefold.weights.checkpoint_source import (
    read_config,
    read_tensors,
    tensor_shapes,
    tokenizer_folder,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 1 (the best) and 2."""
    checkpointer = make_checkpointer(tmp_path / "run" / "checkpoints")
    checkpointer.save(make_state(1), best=True)
    checkpointer.save(make_state(2))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (".", 2),
        ("checkpoints", 2),
        ("checkpoints/latest", 2),
        ("checkpoints/best", 1),
        ("checkpoints/step-00000001", 1),
    ],
)
def test_what_a_path_means(run: Path, given: str, meant: int) -> None:
    assert is_checkpoint(run / given)
    assert is_checkpoint(str(run / given))
    folder = resolve_checkpoint(run / given)
    assert folder.resolve() == (run / f"checkpoints/step-{meant:08d}").resolve()
    tensors = dict(read_tensors(run / given))
    expected = make_state(meant).tensors
    assert sorted(tensors) == ["embedding.weight", "norm.weight", "scale"]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[f"model/{name}"])


def test_config_tokenizer_and_shapes(run: Path) -> None:
    assert read_config(run) == {"model_type": "llama", "vocab_size": 40}
    assert (tokenizer_folder(run) / "tokenizer.json").is_file()
    assert tensor_shapes(run)["embedding.weight"] == (40, 16)


def test_a_few_tensors_by_name(run: Path) -> None:
    [(name, tensor)] = read_tensors(run, ["norm.weight"])
    assert name == "norm.weight"
    assert torch.equal(tensor, make_state(2).tensors["model/norm.weight"])
    with pytest.raises(
        CheckpointError, match=r"no tensor norms.weight; did you mean 'norm.weight'"
    ):
        list(read_tensors(run, ["norms.weight"]))


def test_optimizer_files_are_not_read(run: Path) -> None:
    (run / "checkpoints/step-00000002/__0_1.distcp").unlink()
    assert len(dict(read_tensors(run))) == 3


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_damage_is_noticed(run: Path, name: str) -> None:
    path = run / "checkpoints/step-00000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is corrupt.*step-00000001"):
        list(read_tensors(run))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_damaged_model_files_are_noticed(run: Path, name: str) -> None:
    (run / "checkpoints/step-00000002/model" / name).write_text("{ }")
    with pytest.raises(CheckpointError, match=f"{name} is truncated|{name} is too long"):
        read_config(run)
        tokenizer_folder(run)


def test_a_checkpoint_without_a_config_says_so(run: Path) -> None:
    manifest = run / "checkpoints/step-00000002/manifest.json"
    manifest.write_text(manifest.read_text().replace("model/config.json", "model/other.json"))
    with pytest.raises(CheckpointError, match=r"holds no model/config.json"):
        read_config(run)


def test_other_paths_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "config.json")
    assert not is_checkpoint(tmp_path / "absent")


def test_half_written_and_empty_places_say_what_is_the_matter(run: Path, tmp_path: Path) -> None:
    whole = run / "checkpoints/step-00000002"
    partial = whole.rename(whole.with_name("step-00000002.partial"))
    assert is_checkpoint(partial)
    with pytest.raises(CheckpointError, match="half-written"):
        resolve_checkpoint(partial)
    assert resolve_checkpoint(run).name == "step-00000001"
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    assert is_checkpoint(tmp_path / "new")
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        resolve_checkpoint(tmp_path / "new")
    (run / "checkpoints/step-00000001/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        resolve_checkpoint(run / "checkpoints/step-00000001")
