"""`fivefold train` as a user runs it: real processes, real text, killed and started again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fivefold.axes.pp.record import from_numbers
from tests.end_to_end import runs


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred kilobytes of real source text."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def straight(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 12 steps on one process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    runs.run(*runs.train_arguments(folder, texts, "train.steps=12"))
    return folder


def test_a_run_learns_and_leaves_its_records(straight: Path) -> None:
    rows = runs.metrics(straight)
    assert len(rows) == 12
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu",
                "step_seconds", "memory_bytes"):  # fmt: skip
        assert key in rows[0]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    for name in ("config.yaml", "events.jsonl", "report.html", "checkpoints/latest"):
        assert (straight / name).is_file()


def test_the_same_command_again_adds_nothing(straight: Path, texts: Path) -> None:
    before = runs.losses(straight)
    runs.run(*runs.train_arguments(straight, texts, "train.steps=12"))
    assert runs.losses(straight) == before


@pytest.mark.parametrize(
    "kill_at", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(7, marks=pytest.mark.slow)]
)
def test_killed_and_restarted_it_gives_the_same_bits(
    straight: Path, texts: Path, tmp_path: Path, kill_at: int
) -> None:
    arguments = runs.train_arguments(tmp_path / "run", texts, "train.steps=12")
    assert runs.kill_when(arguments, lambda: len(runs.metrics(tmp_path / "run")) >= kill_at)
    runs.run(*arguments)
    assert runs.losses(tmp_path / "run") == runs.losses(straight)


@pytest.fixture(scope="module")
def killed(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of two ranks with a layout that was killed after its first checkpoint: to be copied."""

    @cache
    def get(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("killed") / "run"
        arguments = runs.train_arguments(folder, texts, "train.steps=12", nproc=2, layout=layout)
        assert runs.kill_when(arguments, lambda: len(runs.metrics(folder)) >= 6)
        return folder

    return get


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2,zero=3",
        *(
            pytest.param(layout, marks=pytest.mark.slow)  # half a minute each
            for layout in ("dp_shard=2,zero=2", "tp=2", "pp=2,schedule=zb-h1")
        ),
    ],
)
def test_two_ranks_killed_and_restarted(
    killed: Callable[[str], Path], texts: Path, tmp_path: Path, layout: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    shutil.copytree(killed(layout), broken)
    for folder in (whole, broken):
        runs.run(*runs.train_arguments(folder, texts, "train.steps=12", nproc=2, layout=layout))
    assert runs.losses(broken) == runs.losses(whole)
    if "pp" in layout:  # the second step's times, which `fivefold plan schedule --measured` draws
        measured = from_numbers(json.loads((whole / "pipeline.json").read_text()))
        assert measured.schedule.name == "zb-h1"
        assert {span.rank for span in measured.spans} == {0, 1}


def test_the_layout_may_change_between_starts(
    killed: Callable[[str], Path], straight: Path, texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed("dp_shard=2,zero=3"), folder)
    runs.run(*runs.train_arguments(folder, texts, "train.steps=12"))
    for ours, theirs in zip(runs.losses(folder), runs.losses(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_dead_rank_ends_the_others_and_is_named(texts: Path, tmp_path: Path) -> None:
    import psutil

    folder = tmp_path / "run"
    arguments = runs.train_arguments(
        folder, texts, "train.steps=5000", nproc=2, layout="dp_shard=2"
    )
    process = subprocess.Popen(
        runs.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while process.poll() is None and len(runs.metrics(folder)) < 2:
            psutil.cpu_percent(interval=0.05)
        ranks = [
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if "fivefold" in p.cmdline() and p.environ().get("RANK") == "1"
        ]
        ranks[0].kill()
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1" in errors and "SIGKILL" in errors, errors[-2000:]
    assert "Traceback" not in errors
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])
    ]


def test_sigterm_saves_and_says_so(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = runs.train_arguments(folder, texts, "train.steps=5000", "checkpoint.every=0")
    process = subprocess.Popen(runs.command(*arguments), stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and len(runs.metrics(folder)) < 3:
            subprocess.run(["sleep", "0.02"], check=True)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "the same command resumes it" in errors
    steps = len(runs.metrics(folder))
    assert (folder / "checkpoints" / "latest").read_text().strip().endswith(f"{steps:08d}")


def test_a_loss_that_is_not_finite_stops_with_its_record(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    failed = runs.run(
        *runs.train_arguments(
            folder, texts, "train.steps=40", "optimizer.lr=1e18", "optimizer.warmup=0",
            "train.clip_norm=null", "checkpoint.every=1",
        ),
        ok=False,
    )  # fmt: skip
    assert failed.returncode == 1
    assert "is not finite, training stopped" in failed.stderr
    assert "Traceback" not in failed.stderr
    rows = runs.metrics(folder)
    assert rows[-1]["loss"] is None or rows[-1]["grad_norm"] is None
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    assert int(latest.rsplit("-", 1)[1]) < rows[-1]["step"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.seed=5"], "holds a run with train.seed=0, but this one has 5"),
        (["optimizer.lr=0.5"], "holds a run with optimizer.lr="),
        (["checkpoint.resume=false"], "checkpoint.resume is false"),
    ],
)
def test_a_run_directory_with_another_configuration(
    straight: Path,
    texts: Path,
    sets: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = runs.train_arguments(straight, texts, "train.steps=12", *sets)
    printed = runs.refused(*arguments, capfd=capfd)
    assert message in printed and "choose another --run-dir" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "dp_shard=2"], "needs 2 ranks, but 1 were started; start it with --nproc 2"),
        (["--layout", "dp_shard=2", "--nproc", "4"], "needs 2 ranks, but 4 were started"),
        (["--set", "train.stepz=2"], "did you mean 'train.steps'"),
        (
            ["--layout", "tp=4", "--nproc", "4"],
            "tp=4 does not divide the model's 6 attention heads",
        ),
        (["--layout", "pp=7", "--nproc", "7"], "6 layers cannot be split into 7 pipeline stages"),
        (["--set", "data.tokenizer=bpe:9000"], "vocab_size"),
        (["--set", "data.sources=/does/not/exist"], "/does/not/exist"),
        (["--set", "model.config.model_type=lama"], "did you mean 'llama'"),
    ],
)
def test_errors_before_any_work(
    tmp_path: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "run")
    printed = runs.refused("train", "quickstart", "--run-dir", run_dir, *arguments, capfd=capfd)
    assert message in printed
    assert "Traceback" not in printed


def test_export_opens_in_transformers_and_comes_back(
    straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported, back = tmp_path / "exported", tmp_path / "back"
    runs.inside("convert", str(straight), str(exported), capfd=capfd)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    asked = ["--prompt", "def main(", "--max-new-tokens", "12", "--dtype", "fp32", "--json"]
    answer = runs.inside("generate", "--model", str(exported), *asked, capfd=capfd)
    assert json.loads(answer)["token_ids"] == theirs
    runs.inside("convert", str(exported), str(back), "--to", "checkpoint", capfd=capfd)
    again = runs.inside("generate", "--model", str(back), *asked, capfd=capfd)
    assert json.loads(again)["token_ids"] == theirs
