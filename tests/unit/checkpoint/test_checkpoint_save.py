"""Saving and loading in one process: bits, order, pointers, retention, the background."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    Watched,
    assert_loads,
    assert_same,
    blank_state,
    make_checkpointer,
    make_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import CheckpointError
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.engines.train.checkpoint.retention import to_remove
from fivefold.weights.checkpoint_manifest import hash_file


def step_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = make_checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(make_state(3))
    checkpointer.wait()
    assert_loads(tmp_path, 3)


def test_values_that_are_not_numbers_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -1, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.save(TrainState(1, {"model/odd": bits.view(torch.float32)}))
    state = TrainState(0, {"model/odd": torch.zeros(5)})
    checkpointer.load(tmp_path / "step-00000001", state)
    assert torch.equal(state.tensors["model/odd"].view(torch.int32), bits)


def test_loading_fills_the_given_tensors_in_place(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.save(make_state(1))
    state = blank_state()
    parameter = torch.nn.Parameter(state.tensors["model/norm.weight"])
    state.tensors["model/norm.weight"] = parameter
    checkpointer.load(tmp_path / "step-00000001", state)
    assert torch.equal(parameter.detach(), make_state(1).tensors["model/norm.weight"])


def test_views_are_saved_without_the_storage_behind_them(tmp_path: Path) -> None:
    flat = torch.arange(100_000, dtype=torch.float32)
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.save(TrainState(1, {"model/a": flat[:10], "model/b": flat.view(100, 1000).T[:3]}))
    size = (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_size
    assert size < 10_000
    state = TrainState(0, {"model/a": torch.zeros(10), "model/b": torch.zeros(3, 100)})
    checkpointer.load(tmp_path / "step-00000001", state)
    assert torch.equal(state.tensors["model/b"], flat.view(100, 1000).T[:3])


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_checkpointer(tmp_path / name).save(make_state(5))
    a, b = (tmp_path / name / "step-00000005" / "manifest.json" for name in ("a", "b"))
    assert a.read_text() == b.read_text()


def test_training_goes_on_while_the_state_is_written(tmp_path: Path) -> None:
    go_on = threading.Event()
    files = Watched(at=2, act=lambda _: go_on.wait(30) or None)
    checkpointer = make_checkpointer(tmp_path, asynchronous=True, files=files)
    state = make_state(1)
    checkpointer.save(state)  # returns although nothing can be written yet
    assert checkpointer.latest() is None
    for tensor in state.tensors.values():
        tensor.zero_()
    state.rank_tensors["cpu"].zero_()
    state.scalars["position"]["consumed"] = -1
    go_on.set()
    checkpointer.wait()
    assert_loads(tmp_path, 1)


def test_the_generator_of_training_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    checkpointer = make_checkpointer(tmp_path, asynchronous=True)
    checkpointer.save(make_state(1))
    checkpointer.wait()
    checkpointer.load(tmp_path / "step-00000001", blank_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    """A power cut must not leave a name whose content was not synced."""
    files = Watched()
    make_checkpointer(tmp_path, files=files).save(make_state(1), best=True)
    partial = tmp_path / "step-00000001.partial"
    commit = files.operations.index(("rename", partial))
    before, after = files.operations[:commit], files.operations[commit + 1 :]
    for position, (operation, path) in enumerate(before):
        if operation == "create":
            assert ("sync", path) in before[position:], path
    made = [path for path in (tmp_path / "step-00000001").rglob("*") if path.is_file()]
    for path in made:
        name = path.relative_to(tmp_path / "step-00000001")
        # DCP writes .metadata under another name first.
        written = partial / (".metadata.tmp" if name.name == ".metadata" else name)
        assert ("sync", written) in before, name
    creations = [path.name for operation, path in before if operation == "create"]
    in_folder = [name for name in creations if not name.startswith(("latest", "best"))]
    assert in_folder[-1] == "manifest.json"
    manifest = before.index(("create", partial / "manifest.json"))
    assert ("sync", partial) in before[manifest:]
    assert ("sync", partial / "model") in before
    # Pointers follow only once the folder's own name is synced, and take no more space.
    assert after[0] == ("sync", tmp_path)
    assert [path.name for op, path in after if op == "rename"] == ["best.partial", "latest.partial"]
    assert after[-1] == ("sync", tmp_path)


def test_the_manifest_names_every_file_with_its_hash(tmp_path: Path) -> None:
    make_checkpointer(tmp_path).save(make_state(1))
    folder = tmp_path / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    del files["manifest.json"]
    assert manifest["files"] == {
        name: {"size": path.stat().st_size, "sha256": hash_file(path)}
        for name, path in files.items()
    }
    assert (manifest["step"], manifest["world_size"], manifest["layout"]) == (1, 1, "single")


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        checkpointer.save(make_state(step), best=step == 2)
    assert step_folders(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
    assert (tmp_path / "best").read_text() == "step-00000002\n"
    checkpointer.save(make_state(6), best=True)
    assert step_folders(tmp_path) == ["step-00000005", "step-00000006"]


def test_going_back_by_the_pointer_keeps_what_came_after(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpointer.save(make_state(step))
    (tmp_path / "latest").write_text("step-00000001\n")
    assert_loads(tmp_path, 1)
    checkpointer = make_checkpointer(tmp_path, keep=1)
    checkpointer.save(make_state(2))
    assert step_folders(tmp_path) == ["step-00000002", "step-00000003"]
    assert_loads(tmp_path, 2)


def test_a_step_is_saved_over_its_older_self(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    other = make_state(9)
    checkpointer.save(TrainState(1, other.tensors, other.scalars, other.rank_tensors))
    checkpointer.save(make_state(1))
    assert step_folders(tmp_path) == ["step-00000001"]
    assert_loads(tmp_path, 1)


@pytest.mark.parametrize("content", [None, "", "step-00000009", "../elsewhere", "\xff\xfe"])
def test_a_lost_or_foolish_pointer_means_the_newest(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "checkpoints"
    make_checkpointer(folder).save(make_state(1))
    if content is None:
        (folder / "latest").unlink()
    else:
        (folder / "latest").write_bytes(content.encode("latin1"))
    assert_loads(folder, 1)


def test_an_empty_or_absent_folder_has_no_latest(tmp_path: Path) -> None:
    assert make_checkpointer(tmp_path / "none").latest() is None
    assert make_checkpointer(tmp_path).latest() is None


def test_what_dead_runs_left_is_removed_at_the_start(tmp_path: Path) -> None:
    make_checkpointer(tmp_path).save(make_state(1))
    (tmp_path / "step-00000002.partial" / "model").mkdir(parents=True)
    (tmp_path / "step-00000002.partial" / "model" / "config.json").write_text("{")
    (tmp_path / "latest.partial").write_text("step-0000")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tmp_path / "step-00000002.partial" / "link").symlink_to(outside)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.replaced")  # killed mid-swap
    make_checkpointer(tmp_path)
    assert step_folders(tmp_path) == ["outside", "step-00000001"]
    assert not (tmp_path / "latest.partial").exists()
    assert (outside / "kept").exists()
    assert_loads(tmp_path, 1)


def test_a_partial_folder_is_never_loaded(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.save(make_state(1))
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.partial")
    assert checkpointer.latest() is None


def test_scalars_that_json_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    state = make_state(1)
    state.scalars["generator"] = torch.Generator()
    with pytest.raises(TypeError, match="Generator"):
        make_checkpointer(tmp_path, asynchronous=True).save(state)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_model_writer_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def broken(_: Path) -> None:
        raise ValueError("no such tokenizer")

    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False, model_files=broken)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written .*no such tokenizer"):
        checkpointer.save(make_state(1))
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    saves=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=6),
    keep=st.integers(1, 3),
)
def test_any_sequence_of_saves_keeps_the_last_the_best_and_no_more(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, bool]], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("saves")
    best = None
    for step, is_best in saves:
        make_checkpointer(folder, keep=keep).save(make_state(step), best=is_best)
        best = step if is_best else best
        assert_loads(folder, step)
        assert to_remove(folder, keep) == []
        if best is not None:
            loaded = make_checkpointer(folder).load(folder / f"step-{best:08d}", blank_state())
            assert_same(loaded, best)
            assert (folder / "best").read_text() == f"step-{best:08d}\n"
        past = [n for n in step_folders(folder) if int(n[5:]) <= step]
        assert len(past) <= keep + 1
