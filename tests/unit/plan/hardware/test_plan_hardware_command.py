"""The commands that list what is known by name."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from fivefold.cli.plan_hardware import plan_hardware, plan_models
from fivefold.plan.hardware.catalogue import DEVICES
from fivefold.plan.models.parse import names

app = typer.Typer()
app.command("hardware")(plan_hardware)
app.command("models")(plan_models)


def run(*arguments: str) -> str:
    ran = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_devices() -> None:
    told = run("hardware")
    assert all(name in told for name in DEVICES)
    assert json.loads(run("hardware", "--json"))["H100"]["peak"]["bf16"] == 989.4e12


def test_a_cluster_with_its_sources() -> None:
    told = run("hardware", "8x8xH100")
    for part in ("NVLink 4", "InfiniBand 400 Gb/s", "nccl-tests", "Nebius", "data sheet"):
        assert part in told, part
    assert json.loads(run("hardware", "8x8xH100", "--json"))["inside"]["bandwidth"] == 450e9


def test_models() -> None:
    told = run("models")
    assert all(name in told for name in names())
    assert len(json.loads(run("models", "--json"))) == len(names())
    one = json.loads(run("models", "7B", "--json"))
    assert one["parameters"] == 6_738_415_616 and one["by component"]["head"] == 32_000 * 4096
    told = run("models", "gpt-oss-20b")
    assert "attention" in told and "sinks" in told
