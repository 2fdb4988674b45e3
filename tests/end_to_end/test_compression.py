"""A run with compressed gradients, killed and started again, loses none of what it carries over."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.end_to_end import runs

SETS = (
    "train.steps=8", "checkpoint.every=3", "communication.compression=topk",
    "communication.ratio=0.05", "communication.warmup_steps=2",
)  # fmt: skip
LAYOUT = "dp_shard=2,zero=1"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred kilobytes of real source text."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")):
        shutil.copy(path, folder / path.name)
    return folder


@pytest.mark.slow
def test_killed_and_restarted_it_gives_the_same_bits(texts: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    runs.run(*runs.train_arguments(whole, texts, *SETS, nproc=2, layout=LAYOUT))
    arguments = runs.train_arguments(broken, texts, *SETS, nproc=2, layout=LAYOUT)
    assert runs.kill_when(arguments, lambda: len(runs.metrics(broken)) >= 5)
    runs.run(*arguments)
    assert runs.losses(broken) == runs.losses(whole)
    assert "compression memory dropped" not in events(broken)


@pytest.mark.slow
def test_another_layout_goes_on_without_the_memories_and_says_so(
    texts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    runs.run(*runs.train_arguments(run, texts, *SETS, nproc=2, layout=LAYOUT))
    more = ("train.steps=9", *SETS[1:])
    runs.run(*runs.train_arguments(run, texts, *more, nproc=2, layout="dp_replicate=2"))
    assert len(runs.losses(run)) == 9
    assert "compression memory dropped" in events(run)


@pytest.mark.slow
def test_divided_gradients_are_refused_in_one_line(texts: Path, tmp_path: Path) -> None:
    arguments = runs.train_arguments(
        tmp_path / "run", texts, *SETS, nproc=2, layout="dp_shard=2,zero=2"
    )
    done = runs.run(*arguments, ok=False)
    assert done.returncode != 0
    assert "communication.compression=topk needs a rank's whole gradient" in done.stderr
    assert "use zero=1" in done.stderr


def events(run_dir: Path) -> list[str]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]
