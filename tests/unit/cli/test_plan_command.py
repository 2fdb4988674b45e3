"""`fivefold plan`: what is printed and written, and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.core.errors import FivefoldError
from fivefold.core.resolve import resolve

CASE = (
    "--model",
    "llama-3.1-8b",
    "--cluster",
    "2x8xH100",
    "--workload",
    "seq=4096,batch=128,tokens=100B",
)


def plan(*arguments: str) -> str:
    shown = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    assert shown.exit_code == 0, shown.output
    return shown.output


def test_the_answer_on_a_terminal(tmp_path: Path) -> None:
    recipe, html = tmp_path / "plan.yaml", tmp_path / "plan.html"
    printed = plan(
        *CASE, "--layout", "tp=8,dp=2", "--explain", "--flags", "megatron",
        "--recipe", str(recipe), "--html", str(html),
    )  # fmt: skip
    for text in (
        "best: ", "MFU", "days", "on spot instances", "ranking: the best of each shape", "front:",
        "your layout", "accumulation steps", "Megatron-LM:", "--tensor-model-parallel-size",
        f"wrote {recipe}", f"wrote {html}",
    ):  # fmt: skip
        assert text in printed, text
    assert str(resolve(str(recipe)).config.layout) in printed
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_json_has_all_of_it() -> None:
    found = json.loads(plan(*CASE, "--json", "--flags", "torchtitan"))
    assert found["best"]["fits"] and found["best"]["devices"] == 16
    assert found["flags"]["system"] == "torchtitan"
    assert found["ranking"][0] == found["best"]


def test_subcommands_are_still_there() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "160"}).output
    for name in ("schedule", "memory", "serve", "compare", "hardware", "models"):
        assert name in shown
    assert "1f1b: 2 ranks" in plan("schedule", "--pp", "2", "--microbatches", "2")
    assert CliRunner().invoke(app, ["plan"]).exit_code == 2


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"--model": None}, "--model is missing; give e.g. --model llama-3.1-70b"),
        ({"--cluster": None}, "--cluster is missing"),
        ({"--workload": None}, "--workload is missing"),
        ({"--cluster": "2x8xH10"}, "there is no device 'H10' in the catalogue; close are H100"),
        ({"--model": "lama-3.1-8b"}, "llama-3.1-8b"),
        ({"--workload": "seq=4096,batch=128,precision=fp16"}, None),
        ({"--cluster": "2x8xV100"}, "V100 has no products in bf16"),
        ({"--flags": "vllm"}, "vllm serves and does not train; use `fivefold plan serve`"),
        ({"--flags": "megatrn"}, "did you mean 'megatron'?"),
        ({"--objective": "speed"}, "unknown objective 'speed'"),
        ({"--software": "fivfold"}, "unknown training system 'fivfold'; known: fivefold, "),
        ({"--html": "/nowhere/at/all.html"}, "cannot write /nowhere/at/all.html"),
        ({"--model": "llama-3.1-405b", "--cluster": "1x8xH100"}, "does not fit by "),
    ],
)
def test_errors_say_what_is_wrong_and_the_mend(
    changed: dict[str, str | None], says: str | None
) -> None:
    options: dict[str, str | None] = dict(zip(CASE[::2], CASE[1::2], strict=True))
    merged = {**options, **changed}
    words = [word for name, value in merged.items() if value is not None for word in (name, value)]
    if says is None:
        plan(*words)
        return
    with pytest.raises(FivefoldError) as refused:
        plan(*words)
    assert says in str(refused.value)
