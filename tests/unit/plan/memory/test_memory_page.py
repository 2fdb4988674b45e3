"""What `docs/plan-memory.md` shows can be run as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "plan-memory.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ fivefold (.+)$", PAGE, re.MULTILINE)


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("0 ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


def test_options_that_the_page_names_exist() -> None:
    said = CliRunner().invoke(app, ["plan", "memory", "--help"], env={"COLUMNS": "200"}).output
    for option in (
        "--svg",
        "--json",
        "--explain",
        "--context",
        "--sequences",
        "--kv",
        "--software",
    ):
        assert option in PAGE and option in said
