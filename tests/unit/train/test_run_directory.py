"""A run directory belongs to one configuration and one running process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.core.errors import ConfigError
from fivefold.core.resolve import resolve
from fivefold.engines.train import run_directory
from fivefold.engines.train.run_directory import RunDirectory


def claim(folder: Path, *sets: str, layout: str | None = None) -> None:
    directory = RunDirectory(folder)
    directory.make()
    directory.claim(resolve("quickstart", layout=layout, sets=sets).config)


def test_the_same_and_freely_changing_keys_may_come_back(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path)
    claim(tmp_path, "train.steps=500", "checkpoint.every=7", layout="dp_shard=2")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.config.hidden_size=96", "model.config.hidden_size=192"),
        ("train.seed=1", "train.seed=0"),
        ("data.sequence_length=128", "data.sequence_length=256"),
        ("precision.dtype=bf16", "precision.dtype='fp32'"),
    ],
)
def test_another_configuration_is_refused_by_key(tmp_path: Path, change: str, named: str) -> None:
    claim(tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=f"holds a run with {named}"):
        claim(tmp_path, change)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_file_in_the_way_and_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run directory"):
        claim(tmp_path / "file" / "run")
    (tmp_path / "config.yaml").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="is not readable YAML"):
        claim(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from fivefold.engines.train.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_and_a_killed_one_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match="another process is running in"),
            RunDirectory(tmp_path).locked(),
        ):
            pass
    finally:
        os.kill(holder.pid, 9)
        holder.wait()
    with RunDirectory(tmp_path).locked():
        pass
