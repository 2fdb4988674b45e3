"""kill -9 and a full disk at any moment of a save: the checkpoint before stays good."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Watched, assert_loads, make_checkpointer, make_state

from fivefold.core.errors import CheckpointError
from fivefold.engines.train.checkpoint.checkpointer import TrainState

DRIVER = Path(__file__).with_name("crash_driver.py")


def drive(*arguments: str) -> str:
    """Run the driver in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "stride",
    [3, pytest.param(1, marks=pytest.mark.slow)],
    ids=["each third", "each"],
)
def test_killed_before_each_file_operation_of_a_run(memory: Path, stride: int) -> None:
    printed = drive("every", str(memory / "checkpoints"), str(stride))
    points = int(printed.split()[-1])
    assert points > 120, "the run must be long enough to mean something"


@pytest.mark.parametrize("moments", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random_while_saving_in_the_background(memory: Path, moments: int) -> None:
    assert f"points {moments}" in drive("random", str(memory / "checkpoints"), str(moments))


def test_a_file_size_limit_of_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    lines = drive("limit", str(folder)).splitlines()
    for line in lines[:2]:
        assert line.startswith(f"cannot write {folder}/step-00000002.partial/__0_0.distcp: ")
        assert "File too large" in line and "bytes needed" in line and "free)" in line
        assert "the latest is step-00000001" in line


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: kill -9 spares it, and nothing waits for a disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_seen_before_it_is_filled(tiny_disk: Path, asynchronous: bool) -> None:
    checkpointer = make_checkpointer(tiny_disk, asynchronous=asynchronous)
    checkpointer.save(make_state(1))
    checkpointer.wait()
    large = TrainState(2, {"model/large": torch.zeros(100_000)})
    files = Watched()
    checkpointer._files = files
    with pytest.raises(CheckpointError, match=r"not enough space left \(402,\d+ bytes needed, "):
        checkpointer.save(large)
        checkpointer.wait()
    assert not [path for operation, path in files.operations if operation == "create"]
    assert_loads(tiny_disk, 1)


def test_a_disk_that_fills_while_writing(tiny_disk: Path) -> None:
    """Someone else takes the space after it was found free."""
    make_checkpointer(tiny_disk).save(make_state(1))

    def fill(_: Path) -> None:
        with (tiny_disk / "other").open("wb") as file:
            try:
                while True:
                    file.write(b"0" * 4096)
                    file.flush()
            except OSError:
                pass

    files = Watched(at=6, act=fill)
    with pytest.raises(
        CheckpointError, match=r"No space left on device .* the latest is step-00000001"
    ):
        make_checkpointer(tiny_disk, files=files).save(make_state(2))
    (tiny_disk / "other").unlink()
    assert sorted(p.name for p in tiny_disk.iterdir()) == ["latest", "step-00000001"]
    assert_loads(tiny_disk, 1)
    make_checkpointer(tiny_disk).save(make_state(2))
    assert_loads(tiny_disk, 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_at_each_file_operation(memory: Path, asynchronous: bool) -> None:
    """The disk is full at that one moment: an error, and the save before or this one counts."""
    watched = Watched()
    make_checkpointer(memory / "whole", files=watched).save(make_state(2))
    pointed = 1 + watched.operations.index(("rename", memory / "whole" / "latest.partial"))
    point = 0
    while True:
        folder = memory / f"at-{point}"
        make_checkpointer(folder).save(make_state(1), best=True)
        files = Watched(at=point)
        checkpointer = make_checkpointer(folder, keep=1, asynchronous=asynchronous, files=files)
        if asynchronous:
            checkpointer.save(make_state(2))
            while checkpointer._pending._thread.is_alive():
                time.sleep(0.001)
            files.at = None
            try:
                checkpointer.save(make_state(3))  # the error of 2 surfaces here
            except CheckpointError as error:
                failure = error
            else:
                checkpointer.wait()
                break
        else:
            try:
                checkpointer.save(make_state(2))
            except CheckpointError as error:
                failure = error
            else:
                break
        left = [p.name for p in folder.iterdir() if p.name.endswith((".partial", ".replaced"))]
        if "is saved, but" in failure.message:
            assert_loads(folder, 2)
        else:
            assert f"cannot write {folder}" in failure.message
            assert "No space left on device" in failure.message
            assert left == []
            # Only what follows the renaming of the pointer can fail with the new one in place.
            now = 2 if point == pointed else 1
            assert f"the latest is step-{now:08d}" in failure.message, failure
            assert_loads(folder, now)
        # The same process goes on saving once there is space again.
        files.at = None
        checkpointer.save(make_state(4))
        checkpointer.wait()
        assert_loads(folder, 4)
        point += 1
    assert point > 25


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoints"):
        make_checkpointer(tmp_path / "checkpoints").save(make_state(1))
