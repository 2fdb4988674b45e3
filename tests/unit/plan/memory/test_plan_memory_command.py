"""`fivefold plan memory`: the table, the picture, JSON, the arithmetic, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.observe.format import size as in_units
from fivefold.plan.hardware.catalogue import device
from fivefold.plan.memory.ledger import Ledger
from fivefold.plan.memory.parts import PARTS
from fivefold.plan.memory.show import bars

MODEL = ["--model", "llama-3.1-70b", "--layout", "tp=8,pp=4,dp_shard=2,zero=1"]


def run(*arguments: str, fails: bool = False) -> str:
    result = CliRunner().invoke(app, ["plan", "memory", *arguments], env={"COLUMNS": "160"})
    if fails:
        assert result.exit_code != 0
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_and_a_stacked_picture() -> None:
    said = run(*MODEL, "--device", "H100", "--recompute", "full")
    assert "llama-3.1-70b" in said.splitlines()[0].lower()
    assert all(part.name in said for part in PARTS)
    rows = [line for line in said.splitlines() if line.startswith("rank ") and "|" in line]
    assert len(rows) == 4 and all("PPP" in row and "GGG" in row for row in rows)
    assert "fits: " in said and "is fullest in: " in said


def test_every_number_as_json() -> None:
    found = json.loads(run(*MODEL, "--json"))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert rank["total"] == sum(rank["bytes"].values())
        assert rank["bytes"]["activations"] == sum(rank["activations"].values())
        assert rank["bytes"]["buffers"] == sum(rank["buffers"].values())
        assert rank["bytes"]["masters"] * 2 == rank["bytes"]["optimizer"]


def test_the_picture_is_svg(tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    run(*MODEL, "--svg", str(file), "--device", "H100")
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and len(e)]
    assert len(boxes) == 4 * len(PARTS)
    widths = [sum(float(b.get("width", 0)) for b in boxes[i::4]) for i in range(4)]
    assert all(width > 0 for width in widths)
    limit = in_units(device("H100").memory)
    assert f"device: {limit}" in "".join(root.itertext())


def test_the_arithmetic() -> None:
    said = run(
        "--model", "llama-2-7b", "--explain", "--context", "4096", "--sequences", "16",
        "--kv", "fp16", "--device", "A100-80GB", "--recompute", "full",
    )  # fmt: skip
    assert "does not fit by " in said
    assert "all parameters: 6,738,415,616" in said and "34.36 GB (32 GiB) in fp16" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3.1-70b", "--layout", "tp=3"], "tp=3 does not divide"),
        (["--model", "llama-3.1-70b", "--recompute", "some"], "--recompute 'some' is not known"),
        (["--model", "llama-3.1-70b", "--layout", "dp_shard=8", "--batch", "12"], "12 sequences"),
        (["--model", "llama-3.1-70b", "--micro-batch", "0"], "--micro-batch 0 is none"),
        (["--model", "llama-3.1-70b", "--device", "H10"], "H10"),
        ([*MODEL, "--svg", "/nowhere/at/all.svg"], "cannot write /nowhere/at/all.svg"),
        ([*MODEL, "--explain", "--context", "64", "--kv", "fp7"], "no format 'fp7'"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, fails=True)


def test_bars_are_in_proportion() -> None:
    ledger = Ledger(0, 100, 0, 100, 200, {"a": 300}, {"b": 100}, 200)
    (line,) = bars([ledger], 100, 2000)
    bar = line.removeprefix("rank 0   ")
    assert bar.startswith("P" * 5 + "G" * 5 + "O" * 10 + "a" * 15 + "b" * 5 + "r" * 10 + " ")
    assert line.index("|") == len("rank 0   ") + 100
