"""Damaged, foreign and hostile checkpoints: refused with one line, before anything is used."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import blank_state, make_checkpointer, make_state
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from fivefold.core.errors import CheckpointError
from fivefold.engines.train.checkpoint.checkpointer import TrainState
from fivefold.weights import checkpoint_source
from fivefold.weights.checkpoint_manifest import hash_file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints; the newer one."""
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.save(make_state(1))
    checkpointer.save(make_state(2))
    return tmp_path / "step-00000002"


def load(folder: Path, state: TrainState | None = None) -> TrainState:
    return make_checkpointer(folder.parent).load(folder, state or blank_state())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def seal(folder: Path) -> None:
    """Make the manifest agree with the files, as an attacker would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def middle_of(folder: Path, tensor: str) -> tuple[Path, int]:
    """A file and a byte in the midst of a tensor's values."""
    metadata = FileSystemReader(folder).read_metadata()
    [place] = [p for i, p in metadata.storage_data.items() if i.fqn == tensor]
    return folder / place.relative_path, place.offset + place.length // 2


GOOD = "to go on from step-00000001, which was verified whole"


@pytest.mark.parametrize(
    "name",
    [".metadata", "__0_0.distcp", "__0_1.distcp", "rng-0.pt", "state.json", "model/config.json"],
)
@pytest.mark.parametrize("how", ["missing", "truncated", "corrupt", "longer", "empty"])
def test_each_file_is_held_to_the_manifest(saved: Path, name: str, how: str) -> None:
    path = saved / name
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, size - 1)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        flip(path, size // 2)
    before = blank_state()
    with pytest.raises(CheckpointError) as caught:
        load(saved, before)
    words = {
        "missing": "is missing",
        "truncated": f"is truncated: {size - 1} bytes, not {size}",
        "empty": f"is truncated: 0 bytes, not {size}",
        "longer": f"is too long: {size + 1} bytes, not {size}",
        "corrupt": "is corrupt",
    }[how]
    assert caught.value.message.startswith(f"{path} {words}")
    assert caught.value.mend.endswith(GOOD)
    assert "\n" not in str(caught.value)
    for tensor in before.tensors.values():
        assert tensor.isnan().all(), "nothing was loaded"


def test_the_tensor_that_damage_hit_is_named(saved: Path) -> None:
    path, at = middle_of(saved, "optimizer/exp_avg_sq/embedding.weight")
    flip(path, at)
    with pytest.raises(
        CheckpointError, match=r"corrupt.*\(hit: optimizer/exp_avg_sq/embedding.weight\);"
    ):
        load(saved)


def test_tensors_cut_off_are_named_and_counted(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    flip(saved / "state.json", 3)
    with pytest.raises(CheckpointError) as caught:
        load(saved)
    assert (
        "(hit: model/embedding.weight, model/norm.weight, model/scale); 1 more damaged"
        in caught.value.message
    )


def test_the_mend_skips_checkpoints_that_are_damaged_too(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpointer.save(make_state(step))
    for step in (2, 3):
        flip(tmp_path / f"step-0000000{step}" / "rng-0.pt", 100)
    with pytest.raises(CheckpointError, match=GOOD):
        load(tmp_path / "step-00000003")
    # And following it works: without the folder that `latest` names, the newest one counts.
    for step in (2, 3):
        for path in sorted((tmp_path / f"step-0000000{step}").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / f"step-0000000{step}").rmdir()
    latest = make_checkpointer(tmp_path).latest()
    assert latest is not None
    assert load(latest).step == 1


def test_without_another_whole_one_the_mend_says_so(tmp_path: Path) -> None:
    make_checkpointer(tmp_path).save(make_state(1))
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no other whole checkpoint is beside it"):
        load(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: "{", "manifest.json is damaged"),
        (lambda m: "[]", "manifest.json is damaged"),
        (lambda m: json.dumps(m | {"files": {"a": {}}}), "manifest.json is damaged"),
        (lambda m: json.dumps(m | {"files": 3}), "manifest.json is damaged"),
        (lambda m: json.dumps(m | {"version": 2}), "format version 2, this program reads 1"),
        (lambda m: json.dumps(m | {"format": "other"}), "says format 'other'"),
        (
            lambda m: json.dumps(m | {"files": {"../x": {"size": 1, "sha256": ""}}}),
            "'../x', which lies outside",
        ),
        (
            lambda m: json.dumps(m | {"files": {"/etc/passwd": {"size": 1, "sha256": ""}}}),
            "'/etc/passwd', which lies outside",
        ),
    ],
)
def test_a_manifest_that_is_not_ours(
    saved: Path, change: Callable[[dict], str], words: str
) -> None:
    path = saved / "manifest.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(saved)


def test_a_folder_without_a_manifest_is_not_whole(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest.json, so it is not a whole"):
        load(saved)


def test_a_link_out_of_the_folder_is_not_followed(saved: Path, tmp_path: Path) -> None:
    (saved / "rng-0.pt").rename(tmp_path / "elsewhere.pt")
    (saved / "rng-0.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"rng-0.pt leads outside the checkpoint"):
        load(saved)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), name=st.sampled_from(["__0_0.distcp", ".metadata"]))
def test_any_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, where: float, name: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        make_checkpointer(folder).save(make_state(1))
    path = folder / "step-00000001" / name
    at = int(where * path.stat().st_size)
    flip(path, at)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is corrupt"):
        load(path.parent)
    flip(path, at)
    assert load(path.parent).step == 1


# What the tensors of this run must be to load them.


def test_a_tensor_that_was_not_saved_is_named(saved: Path) -> None:
    state = blank_state()
    state.tensors["model/layers.0.weight"] = torch.zeros(2)
    with pytest.raises(
        CheckpointError, match=r"holds no tensor model/layers.0.weight; resume with"
    ):
        load(saved, state)


def test_a_tensor_that_the_run_lacks_is_named(saved: Path) -> None:
    state = blank_state()
    del state.tensors["model/norm.weight"]
    with pytest.raises(CheckpointError, match=r"holds model/norm.weight, which this run has not"):
        load(saved, state)


def test_another_shape_or_dtype_is_named(saved: Path) -> None:
    state = blank_state()
    state.tensors["model/embedding.weight"] = torch.zeros(40, 8)
    with pytest.raises(
        CheckpointError,
        match=re.escape("model/embedding.weight as [40, 16] float32, this run has [40, 8] float32"),
    ):
        load(saved, state)
    state.tensors["model/embedding.weight"] = torch.zeros(40, 16, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"this run has .* bfloat16"):
        load(saved, state)


# Hostile folders, sealed with hashes that fit.


class Exploit:
    """Pickles to a call of `os.system`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.marker}",)


def refusal(folder: Path) -> str:
    seal(folder)
    for read in (
        lambda: load(folder),
        lambda: list(checkpoint_source.read_tensors(folder)),
        lambda: checkpoint_source.tensor_shapes(folder),
    ):
        with pytest.raises(CheckpointError) as caught:
            read()
    return str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_metadata_that_calls_a_function_is_refused_and_runs_nothing(
    saved: Path, tmp_path: Path, protocol: int
) -> None:
    marker = tmp_path / "it-ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Exploit(marker), protocol=protocol))
    assert re.search(r"names (posix|os)\.system, which is no part of a checkpoint", refusal(saved))
    assert not marker.exists()
    # The same bytes do run when unpickled freely, so the refusal means something.
    pickle.loads((saved / ".metadata").read_bytes())
    assert marker.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
        b"ctorch.hub\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.filesystem\nos\n.",
        b"Pexternal\n.",
    ],
)
def test_other_ways_to_name_a_function_are_refused(saved: Path, pickled: bytes) -> None:
    (saved / ".metadata").write_bytes(pickled)
    assert "nothing was run" in refusal(saved)


def rewrite(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.storage_meta = None
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


KEY = "model/norm.weight"
PLACE = MetadataIndex(KEY, torch.Size([0]))


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("relative_path", "../../outside", "lies in '../../outside', not in the manifest"),
        ("relative_path", "/etc/passwd", "lies in '/etc/passwd', not in the manifest"),
        ("offset", 10**9, "lies beyond the end"),
        ("offset", -1, "lies beyond the end"),
        ("length", 10, "larger than its bytes"),
        ("transform_descriptors", ["zstd"], "stored in an unknown way"),
    ],
)
def test_pieces_that_lie_elsewhere_are_refused(
    saved: Path, attribute: str, value: object, words: str
) -> None:
    rewrite(saved, lambda m: setattr(m.storage_data[PLACE], attribute, value))
    assert words in refusal(saved)


def test_an_entry_that_dcp_would_unpickle_is_refused(saved: Path) -> None:
    """DCP loads entries that are no tensors by torch.load(weights_only=False)."""
    rewrite(saved, lambda m: m.state_dict_metadata.update({KEY: BytesStorageMetadata()}))
    assert "BytesStorageMetadata, which is no part of a checkpoint" in refusal(saved)


def test_pieces_that_leave_a_gap_are_refused(saved: Path) -> None:
    def shrink(metadata: Metadata) -> None:
        metadata.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([15])

    rewrite(saved, shrink)
    assert f"pieces of {KEY} do not make up its size" in refusal(saved)


def test_a_huge_tensor_without_bytes_is_refused(saved: Path) -> None:
    def inflate(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[KEY]
        entry.size = entry.chunks[0].sizes = torch.Size([10**15])

    rewrite(saved, inflate)
    assert "larger than its bytes" in refusal(saved)


@pytest.mark.parametrize("pickled", [b"", b"\x80\x05N.", b"garbage", b"(lp0\n."])
def test_metadata_that_is_none_is_refused(saved: Path, pickled: bytes) -> None:
    (saved / ".metadata").write_bytes(pickled)
    assert ".metadata" in refusal(saved)


def test_a_tensor_file_that_holds_code_runs_nothing(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    metadata = FileSystemReader(saved).read_metadata()
    place = metadata.storage_data[PLACE]
    torch.save(Exploit(marker), tmp_path / "bad.pt")
    bad = (tmp_path / "bad.pt").read_bytes().ljust(place.length, b"\0")
    path = saved / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset :] = bad
    path.write_bytes(data)

    def fit(metadata: Metadata) -> None:
        metadata.storage_data[PLACE].length = len(bad)
        for other in [i for i in metadata.storage_data if i.fqn == "model/scale"]:
            metadata.storage_data[other].offset = 0

    rewrite(saved, fit)
    seal(saved)
    with pytest.raises(CheckpointError, match=f"cannot read the tensors of {saved}"):
        load(saved)
    assert not marker.exists()


def test_a_generator_file_that_holds_code_runs_nothing(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    torch.save({"cpu": Exploit(marker)}, saved / "rng-0.pt")
    seal(saved)
    with pytest.raises(CheckpointError, match=r"cannot read .*rng-0.pt"):
        load(saved)
    assert not marker.exists()
