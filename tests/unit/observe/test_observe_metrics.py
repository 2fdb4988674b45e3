"""metrics.jsonl and its kin: strict JSON, each step once, whole after a kill at any byte."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import step_records

from fivefold.core.errors import DataError, TrainingError
from fivefold.observe.json_lines import JsonLines, read_json_lines
from fivefold.observe.metrics import MetricsWriter, read_evaluations, read_metrics


def strict_rows(path: Path) -> list[dict]:
    """As another program reads the file: NaN and Infinity are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(folder: Path, steps: range) -> None:
    rows = {row["step"]: row for row in step_records(50)}
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in steps:
            writer.write(rows[step])


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = list(step_records(5))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for row in rows:
            writer.write(row)
            assert read_metrics(tmp_path)[-1] == row  # on disk already, to the last bit
    assert strict_rows(tmp_path / "metrics.jsonl") == rows


def test_not_finite_values_are_null_and_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"step": 1, "loss": math.nan, "grad_norm": -math.inf, "mfu": None,
                      "extra": {"a": [1.0, math.inf]}})  # fmt: skip
    (row,) = strict_rows(tmp_path / "metrics.jsonl")
    assert row["loss"] is None and row["grad_norm"] is None and row["extra"] == {"a": [1.0, None]}
    assert row["not_finite"] == {"loss": "nan", "grad_norm": "-inf", "extra.a.1": "inf"}


def test_scalars_of_torch_and_numpy_and_any_text(tmp_path: Path) -> None:
    text = "zwei\nZeilen \u2028 \ud800 \x00"
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(
            {"step": 1, "loss": torch.tensor(2.5), "grad_norm": np.float32("nan"), "t": text}
        )
        writer.write({"step": 2, "loss": 2.0})
    first, second = read_metrics(tmp_path)
    assert first["loss"] == 2.5 and first["grad_norm"] is None
    assert first["t"].startswith("zwei\nZeilen \u2028") and second["step"] == 2


def test_a_line_torn_at_any_byte_is_mended(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    last = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
        write_steps(tmp_path, range(3, 5))
        assert [r["step"] for r in strict_rows(path)] == [1, 2, 3, 4]
        assert path.read_bytes()[: len(whole)] == whole


def test_what_a_power_loss_leaves_is_mended(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 300 + b"\n\0\0\n[1, 2]\n\xff\xfe{\n")
    assert len(read_metrics(tmp_path)) == 3
    write_steps(tmp_path, range(4, 6))
    assert [r["step"] for r in strict_rows(path)] == [1, 2, 3, 4, 5]


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[3:]]))
    for use in (lambda: read_metrics(tmp_path), lambda: MetricsWriter(tmp_path, tensorboard=False)):
        with pytest.raises(DataError, match=r"metrics\.jsonl line 3 is not a JSON object; delete"):
            use()


@pytest.mark.parametrize("kept", [0, 1, 7, 10, 99])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, kept: int) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for row in step_records(10):
            writer.write(row)
            if row["step"] % 5 == 0:
                writer.write_evaluation(row["step"], 3.0)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.truncate_after(kept)
        assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, min(kept, 10) + 1))
        assert [r["step"] for r in read_evaluations(tmp_path)] == [s for s in (5, 10) if s <= kept]
        for step in range(kept + 1, 13):
            writer.write({"step": step})
    assert [r["step"] for r in strict_rows(tmp_path / "metrics.jsonl")] == list(
        range(1, max(13, 11))
    )[: 12 if kept < 13 else 10]


KILLED = """
import sys
from pathlib import Path
from fivefold.observe.metrics import MetricsWriter
first = int(sys.argv[2])
with MetricsWriter(Path(sys.argv[1]), tensorboard=False) as writer:
    writer.truncate_after(first)
    for step in range(first + 1, 10**9):
        writer.write({"step": step, "loss": 1 / 3, "filler": "x" * (step % 5000)})
"""


def test_kill_minus_nine_loses_no_step(tmp_path: Path) -> None:
    path, resumed_from = tmp_path / "metrics.jsonl", 0
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(resumed_from)])
        size = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < size + 300_000:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        steps = [row["step"] for row in read_metrics(tmp_path)]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > resumed_from
        resumed_from = len(steps) - 7
    write_steps(tmp_path, range(1, 2))
    assert strict_rows(path)[-1]["step"] == 1


@contextmanager
def room(path: Path, more: int) -> Iterator[None]:
    """A disk with `more` bytes left for the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("more", [0, 10])
def test_a_full_disk_is_one_line_and_mended_later(tmp_path: Path, more: int) -> None:
    write_steps(tmp_path, range(1, 4))
    with (
        MetricsWriter(tmp_path, tensorboard=False) as writer,
        room(tmp_path / "metrics.jsonl", more),
        pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl.*; free disk space"),
    ):
        writer.write({"step": 4, "loss": 1.0})
    write_steps(tmp_path, range(4, 5))
    assert [r["step"] for r in strict_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_or_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"cannot write .*nowhere/metrics\.jsonl"):
        MetricsWriter(tmp_path / "nowhere", tensorboard=False)
    with pytest.raises(
        DataError, match=r"holds no metrics\.jsonl; give the folder of a training run"
    ):
        read_metrics(tmp_path)
    assert read_evaluations(tmp_path) == [] and read_json_lines(tmp_path / "none") == []
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(TrainingError, match="Is a directory"):
        JsonLines(tmp_path / "folder.jsonl")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = {row["step"]: row for row in step_records(12)}
    for first, last, sign in ((0, 8, 1.0), (5, 12, -1.0)):
        with MetricsWriter(tmp_path) as writer:
            writer.truncate_after(first)
            for step in range(first + 1, last + 1):
                writer.write(rows[step] | {"loss": sign * step, "note": "text", "mfu": None})
            writer.write_evaluation(last, 2.0)
        time.sleep(1.1)  # event files are ordered by the second in their names
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    loss = {e.step: e.value for e in events.Scalars("train/loss")}
    assert loss == {s: (s if s <= 5 else -s) for s in range(1, 13)}
    assert len(events.Scalars("train/loss")) == 12
    assert [e.step for e in events.Scalars("evaluate/loss")] == [12]
    assert {"train/grad_norm", "train/lr", "train/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )
    assert not {"train/step", "train/note", "train/mfu"} & set(events.Tags()["scalars"])


def test_a_kill_loses_no_tensorboard_step(tmp_path: Path) -> None:
    """Steps before a checkpoint are not run again, so their events must not wait in a queue."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = (
        "import os, sys; from pathlib import Path\n"
        "from fivefold.observe.metrics import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for step in range(1, 8): writer.write({'step': step, 'loss': float(step)})\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 8))
