"""Start the real command line on a real, tiny training run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.cli.main import main

# Small enough for dozens of runs, real in every part: the same code paths as the quickstart.
TINY = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.vocab_size=512",
    "data.tokenizer=bpe:512",
    "data.sequence_length=64",
    "train.global_batch=8",
    "train.micro_batch=2",
    "checkpoint.every=4",
    "evaluate.sequences=8",
    "observe.mfu=false",
    "observe.progress=false",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fivefold", *arguments]


def train_arguments(
    run_dir: Path, texts: Path, *sets: str, nproc: int = 1, layout: str = ""
) -> list[str]:
    values = [*TINY, f"data.sources=[{{path: {texts}, pattern: '**/*.py'}}]",
              f"data.cache={texts.parent / 'cache'}", *sets]  # fmt: skip
    flags = [flag for value in values for flag in ("--set", value)]
    if layout:
        flags += ["--layout", layout]
    if nproc > 1:
        flags += ["--nproc", str(nproc)]
    return ["train", "quickstart", "--run-dir", str(run_dir), *flags]


def refused(*arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command prints that must fail before any work: in this process, which spares a start."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 1
    return capfd.readouterr().err


def inside(*arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command prints to stdout, run in this process, which spares a start."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capfd.readouterr()
    assert not ended.value.code, printed.err
    return printed.out


def run(*arguments: str, timeout: float = 240, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, check=False
    )
    if ok:
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def metrics(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run_dir: Path) -> list[tuple[float, float, float]]:
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [(row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def kill_when(arguments: list[str], ready: Callable[[], bool], timeout: float = 120) -> bool:
    """Start a run and `kill -9` its launcher's group once `ready`; True if it was still running."""
    process = subprocess.Popen(
        command(*arguments), start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + timeout
    try:
        while process.poll() is None and not ready():
            assert time.monotonic() < deadline, "the run did not get there"
            time.sleep(0.005)
        return process.poll() is None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
