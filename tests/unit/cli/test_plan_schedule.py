"""`fivefold plan schedule`: the drawing, the numbers, the picture, the errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.axes.pp.build import SCHEDULES, build_schedule
from fivefold.cli.main import app
from fivefold.core.errors import DataError, FivefoldError, LayoutError


def plan(*arguments: str) -> str:
    shown = CliRunner().invoke(app, ["plan", "schedule", *arguments], env={"COLUMNS": "100"})
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    assert shown.exit_code == 0, shown.output
    return shown.output


def test_the_timeline_is_drawn_with_its_numbers() -> None:
    printed = plan("--schedule", "interleaved", "--pp", "4", "--microbatches", "8")
    assert printed.startswith(
        "interleaved: 4 ranks, 8 stages, 8 micro-batches; bubble 15.8%\nrank 0 |F0a F1a F2a F3a F0b"
    )
    assert "F forward, B backward, = goes on, . idle" in printed
    assert "activations kept at most, by rank: 11 9 7 5 of one stage" in printed
    assert max(map(len, printed.splitlines()[1:10])) <= 100
    assert "\x1b" not in printed  # no colours where nobody sees them


def test_json_has_the_very_actions_that_run() -> None:
    for name in SCHEDULES:
        found = json.loads(plan("--schedule", name, "--pp", "4", "--microbatches", "8", "--json"))
        schedule = build_schedule(name, 4, 8)
        assert found["orders"] == [[str(a) for a in order] for order in schedule.orders]
        assert len(found["spans"]) == sum(map(len, schedule.orders))
    found = json.loads(plan("--pp", "4", "--microbatches", "8", "--json"))
    assert found["bubble_share"] == pytest.approx(3 / 11)
    assert found["peak_in_flight"] == [4, 3, 2, 1]
    slow = json.loads(plan("--microbatches", "8", "--send", "0.5", "--forward", "2", "--json"))
    assert slow["time"] > found["time"]


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "zbv.svg"
    plan("--schedule", "zbv", "--pp", "4", "--microbatches", "8", "--svg", str(path))
    assert path.read_text(encoding="utf-8").startswith("<svg ")


def test_a_timeline_in_a_file_is_drawn_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    arguments = ("--schedule", "dualpipe", "--pp", "4", "--microbatches", "8", "--forward", "1.5")
    path.write_text(plan(*arguments, "--json"))
    assert plan("--measured", str(path)) == plan(*arguments)
    assert plan("--measured", str(path), "--json") == plan(*arguments, "--json")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop("orders"), "no timeline of a pipeline .KeyError: 'orders'."),
        (lambda t: t["spans"].clear(), "it has no spans"),
        (lambda t: t["spans"][0].update(action="9F0"), "9F0 of rank 0 is not of the schedule"),
        (lambda t: t["spans"][0].update(action="F"), "'F' is no action"),
        (lambda t: t["spans"][0].update(end=-1), "0F0 of rank 0 is not of the schedule"),
    ],
)
def test_a_spoilt_timeline_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    timeline = json.loads(plan("--json"))
    spoil(timeline)
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(timeline))
    with pytest.raises(DataError, match=said):
        plan("--measured", str(path))
    path.write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*timeline.json"):
        plan("--measured", str(path))
    with pytest.raises(FivefoldError, match=r"cannot write .*; choose a file in a folder"):
        plan("--svg", str(tmp_path / "no" / "a.svg"))


def test_schedules_that_are_too_long() -> None:
    with pytest.raises(LayoutError, match="make 2,000,000 passes, too many to simulate"):
        plan("--pp", "100", "--microbatches", "10000")
    shown = plan("--pp", "8", "--microbatches", "2000")
    assert "too long to draw here; --svg draws it" in shown and "bubble" in shown


def test_help_and_errors_through_the_command_itself() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fivefold", "plan", "schedule", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    shown = run("--help")
    assert shown.returncode == 0 and "fivefold plan schedule --schedule" in shown.stdout
    failed = run("--schedule", "dualpipe", "--pp", "4", "--microbatches", "6")
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr == (
        "fivefold: dualpipe on 4 ranks needs an even number of at least 8 micro-batches, not 6; "
        "use 8, or the schedule 1f1b\n"
    )
