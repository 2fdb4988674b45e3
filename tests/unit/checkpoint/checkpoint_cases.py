"""States whose values follow from their step, and file operations that can be made to fail."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.engines.train.checkpoint.files import Files

SHAPES = {
    "model/embedding.weight": (40, 16),
    "model/norm.weight": (16,),
    "model/scale": (),
    "optimizer/exp_avg/embedding.weight": (40, 16),
    "optimizer/exp_avg_sq/embedding.weight": (40, 16),
}


def make_state(step: int) -> TrainState:
    """The state of a step: the same values wherever it is made."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return TrainState(
        step, tensors, {"position": {"consumed": 7 * step, "loss": 0.1 * step}},
        {"cpu": generator.get_state()},
    )  # fmt: skip


def blank_state() -> TrainState:
    return TrainState(0, {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()})


def write_model_files(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 40}))
    (folder / "tokenizer.json").write_text("{}")


def make_checkpointer(
    folder: Path, *, keep: int = 2, asynchronous: bool = False, files: Files | None = None
) -> Checkpointer:
    return Checkpointer(
        folder,
        keep=keep,
        asynchronous=asynchronous,
        model_files=write_model_files,
        layout="single",
        files=files,
    )


def assert_same(loaded: TrainState, step: int) -> None:
    """`loaded` is the state of `step`, bit for bit."""
    expected = make_state(step)
    assert loaded.step == step
    assert loaded.scalars == expected.scalars
    assert loaded.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(loaded.tensors[name].view(torch.int32), tensor.view(torch.int32)), name
    assert torch.equal(loaded.rank_tensors["cpu"], expected.rank_tensors["cpu"])


def assert_loads(folder: Path, step: int) -> None:
    """A fresh process would find `step` as the latest and load it whole."""
    checkpointer = make_checkpointer(folder)
    latest = checkpointer.latest()
    assert latest is not None
    assert latest.name == f"step-{step:08d}"
    assert_same(checkpointer.load(latest, blank_state()), step)


class Watched(Files):
    """Keeps the operations in order, and calls `act` before number `at` (from 0).

    Of the writes to one file two count: its first, and one in its midst.
    """

    def __init__(self, at: int | None = None, act: Callable[[Path], None] | None = None) -> None:
        self.at = at
        self.act = act or no_space
        self.operations: list[tuple[str, Path]] = []
        self.writes: Counter[Path] = Counter()

    def before(self, operation: str, path: Path) -> None:
        if operation == "create":
            self.writes[path] = 0
        if operation == "write":
            self.writes[path] += 1
            if self.writes[path] not in (1, 20):
                return
        self.operations.append((operation, path))
        if len(self.operations) - 1 == self.at:
            self.act(path)


def no_space(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def die(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
