"""The command line: help with examples, one-line errors, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.cli.main import main


def fivefold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fivefold", *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["train", "generate", "serve", "convert", "config show"])
def test_help_shows_examples(command: str) -> None:
    shown = fivefold(*command.split(), "--help")
    assert shown.returncode == 0
    assert f"fivefold {command}" in shown.stdout
    assert "Examples" in shown.stdout


def test_version_and_unknown_commands() -> None:
    from fivefold import __version__

    assert fivefold("--version").stdout.strip() == f"fivefold {__version__}"
    unknown = fivefold("trian")
    assert unknown.returncode == 2
    assert "trian" in unknown.stderr


def test_config_show_prints_values_and_origins() -> None:
    shown = fivefold("config", "show", "quickstart", "--set", "train.steps=5", "--json")
    rows = json.loads(shown.stdout)
    assert rows["train.steps"] == {"value": 5, "origin": "--set"}
    assert rows["model.config.vocab_size"]["origin"] == "recipe quickstart"
    assert rows["train.seed"]["origin"] == "default"
    assert "# recipe quickstart" in fivefold("config", "show", "quickstart").stdout


def test_config_lists_recipes_and_keys() -> None:
    assert "quickstart" in fivefold("config", "list").stdout.split()
    assert "optimizer.lr" in fivefold("config", "keys").stdout


def test_an_error_is_one_line_and_debug_shows_more() -> None:
    failed = fivefold("config", "show", "quickstrat")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr == (
        "fivefold: no recipe or file named 'quickstrat'; did you mean 'quickstart'?\n"
    )
    assert "Traceback" in fivefold("config", "show", "quickstrat", "--debug").stderr


def test_convert_refuses_what_it_would_overwrite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit) as ended:
        main(["convert", "smollm2", str(tmp_path)])
    assert ended.value.code == 1
    assert "is not empty; choose a new folder" in capfd.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"
