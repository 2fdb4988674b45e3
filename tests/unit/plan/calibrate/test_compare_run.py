"""A run's plan beside its records, and what is learnt from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from fivefold.axes.pp.record import to_numbers
from fivefold.cli.plan_compare import plan_compare
from fivefold.core.errors import DataError, PlanError
from fivefold.plan.calibrate.compare import Line, cluster_of_run, compare, predict
from fivefold.plan.calibrate.finished import read_finished
from fivefold.plan.calibrate.recalibrate import file_for, recalibrated, slowdown
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.hardware.profile import Gemm, Profile, Transfer, own_profile, write_profile
from fivefold.plan.time.simulated import simulated_step

MODEL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
CPU = {"device": "a box", "cores": 2}
GPU = {"device": "NVIDIA H100 80GB HBM3", "devices_here": 8}


def profile() -> Profile:
    return Profile(
        name="a box", date="2026-11-30T08:00:00Z", versions={}, device_type="cpu", devices=1,
        threads=2, memory=16e9, launch=2e-6,
        gemm=(Gemm(dtype="fp32", m=4096, k=4096, n=4096, seconds=1.0),),
        transfers=(Transfer(what="read", bytes=10**9, seconds=0.05),),
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """A user whose machine is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_profile(profile(), own_profile("cpu"))
    return tmp_path


def write_run(folder: Path, hardware: dict, seconds: float = 0.5, **config: object) -> Path:
    """The records of twelve steps; the first two are slow."""
    run = folder / "run"
    run.mkdir()
    values: dict = {
        "model": {"config": MODEL},
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 12, "loss_chunk": 128},
        "data": {"sequence_length": 256},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(values | config))
    rows = [
        {
            "step": step, "loss": 5.0, "step_seconds": took, "tokens_per_second": 2048 / took,
            "mfu": 0.3, "memory_bytes": 700 * 2**20,
        }
        for step in range(1, 13)
        for took in [10.0 if step <= 2 else seconds * (1 + 0.01 * (step % 3 - 1))]
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "events.jsonl").write_text(
        json.dumps({"event": "start", "time": 0, "step": 0, "hardware": hardware}) + "\n"
    )
    return run


def test_what_a_run_was(home: Path) -> None:
    run = read_finished(write_run(home, CPU))
    assert run.step_seconds == pytest.approx(0.5) and run.steps == 12
    assert (run.training.sequence, run.training.global_batch, run.training.compute) == (
        256,
        8,
        "fp32",
    )
    assert run.strategy.micro_batch == 2 and run.software.chunk == 128
    assert run.shape.config.num_layers == 4 and run.memory == 700 * 2**20
    assert run.spread < 0.05


def test_the_first_steps_do_not_count(home: Path) -> None:
    run = write_run(home, CPU)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    found = read_finished(run)
    assert found.step_seconds == pytest.approx(0.5, rel=0.02) and found.spread < 0.05


def test_lines_of_a_run_on_this_machine(home: Path) -> None:
    run = read_finished(write_run(home, CPU))
    where = cluster_of_run(run)
    step, lines = compare(run, where)
    by_name = {line.what: line for line in lines}
    assert by_name["step"].predicted == step.total == predict(run, where).total
    assert by_name["step"].error == pytest.approx(step.total / 0.5 - 1)
    assert by_name["MFU"].error == pytest.approx(step.mfu - 0.3)
    assert by_name["peak memory of rank 0"].measured == 700 * 2**20
    assert by_name["peak memory of rank 0"].predicted > 420 * 2**20
    parts = [line.predicted for line in lines if line.what.startswith("of the step: ")]
    assert sum(parts) == pytest.approx(step.total, rel=1e-6)


def test_a_run_on_gpus_is_found_by_their_name(home: Path) -> None:
    run = read_finished(write_run(home, GPU, layout={"dp_shard": 4, "tp": 2}))
    where = cluster_of_run(run)
    assert where.device.name == "H100" and where.devices == 8
    memory = next(line for line in compare(run, where)[1] if "memory" in line.what)
    assert memory.note == "of tensors"


@pytest.mark.parametrize("hardware", [CPU, GPU])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_what_is_learnt_explains_the_run(home: Path, hardware: dict, factor: float) -> None:
    """A plan with the written file takes as long as the run did."""
    first = read_finished(write_run(home, hardware))
    where = cluster_of_run(first)
    if hardware is GPU:  # so that kernels, not the host, are what takes time
        first = replace(first, software=replace(first.software, dispatch=0.0))
    run = replace(first, step_seconds=predict(first, where).total * factor)
    found = slowdown(run, where)
    assert (found > 1.0) == (factor > 1.0) or factor == 1.0
    path = file_for(run, where, home / "run")
    assert path.suffix == (".json" if hardware is CPU else ".yaml")
    note = recalibrated(run, where, found, path)
    assert "run run" in note
    learnt = cluster(str(path))
    assert predict(run, learnt).total == pytest.approx(run.step_seconds, rel=2e-3)
    assert learnt.devices == where.devices


def test_a_second_run_corrects_the_first(home: Path) -> None:
    run = read_finished(write_run(home, CPU))
    where = cluster_of_run(run)
    once = home / "once.json"
    recalibrated(run, where, 1.5, once)
    write_profile(profile().model_copy(update={"corrections": {"step": 1.5}}), own_profile("cpu"))
    recalibrated(run, cluster("1xthis"), 2.0, once)
    assert json.loads(once.read_text())["corrections"]["step"] == pytest.approx(3.0)


def test_a_run_that_kernels_cannot_explain(home: Path) -> None:
    run = replace(read_finished(write_run(home, CPU)), step_seconds=1e-7)
    with pytest.raises(PlanError, match="kernels alone do not explain a step"):
        slowdown(run, cluster_of_run(run))


def test_a_pipeline_has_a_line_a_stage(home: Path) -> None:
    folder = write_run(home, CPU, layout={"pp": 2})
    planned = read_finished(folder)
    where = cluster_of_run(planned)
    _, timeline = simulated_step(
        planned.shape, planned.training, planned.strategy, where, planned.software
    )
    (folder / "pipeline.json").write_text(json.dumps(to_numbers(timeline)))
    by_name = {line.what: line for line in compare(read_finished(folder), where)[1]}
    for what in ("bubble", "pipeline", "stage 0 forward", "stage 1 backward"):
        assert by_name[what].error == pytest.approx(0.0, abs=1e-6), what


def test_the_command(home: Path) -> None:
    run = write_run(home, CPU)
    app = typer.Typer()
    app.command()(plan_compare)
    ran = CliRunner().invoke(app, [str(run), "--json"])
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout)
    assert printed["lines"][0]["what"] == "step" and Path(printed["written"]).is_file()
    assert predict(read_finished(run), cluster(printed["written"])).total == pytest.approx(
        0.5, rel=2e-3
    )
    ran = CliRunner().invoke(app, [str(run), "--keep"])
    assert ran.exit_code == 0 and "tokens per second" in ran.stdout
    assert predict(read_finished(run), cluster("1xthis")).total == pytest.approx(0.5, rel=2e-3)


def test_the_command_compares_where_nothing_can_be_learnt(home: Path) -> None:
    run = write_run(home, CPU, seconds=1e-7)
    app = typer.Typer()
    app.command()(plan_compare)
    ran = CliRunner().invoke(app, [str(run), "--json"])
    printed = json.loads(ran.stdout)
    assert printed["slowdown"] is None and printed["written"] is None and printed["lines"]
    assert "kernels alone" in printed["learnt"] and not (run / "hardware.json").exists()


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("metrics.jsonl", None, DataError), ("config.yaml", None, DataError),
        ("metrics.jsonl", "", DataError), ("pipeline.json", "{", DataError),
    ],
)  # fmt: skip
def test_records_that_are_missing(home: Path, file: str, text: str | None, error: type) -> None:
    run = write_run(home, CPU)
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
    with pytest.raises(error, match=r"run|metrics|config|pipeline"):
        read_finished(run)


def test_a_machine_that_was_not_measured(home: Path) -> None:
    own_profile("cpu").unlink()
    run = read_finished(write_run(home, CPU))
    with pytest.raises(PlanError, match="bench device"):
        cluster_of_run(run)


def test_errors_of_lines() -> None:
    assert Line("a", "s", 2.0, 1.0).error == 1.0
    assert Line("a", "1", 0.5, 0.3).error == pytest.approx(0.2)
    assert Line("a", "s", 2.0, None).error is None and Line("a", "s", 2.0, 0.0).error is None


def test_a_cluster_is_the_same_after_its_file(tmp_path: Path) -> None:
    from fivefold.plan.calibrate.recalibrate import _as_file

    where: Cluster = cluster("2x8xH100")
    path = tmp_path / "there.yaml"
    path.write_text(yaml.safe_dump(_as_file(where, "as before")))
    again = cluster(str(path))
    assert again.device.peak == where.device.peak and again.domain == where.domain
    assert replace(again.inside, source="") == replace(where.inside, source="")
    assert (again.failures, again.restart) == (where.failures, where.restart)
