"""Checkpoints on several gloo ranks: resharding, shared errors, ranks that die."""

from __future__ import annotations

import errno
import os
import signal
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fivefold.core.errors import CheckpointError
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.engines.train.checkpoint.files import Files
from fivefold.engines.train.checkpoint.snapshot import take_snapshot
from fivefold.weights.checkpoint_manifest import find_latest
from fivefold.weights.checkpoint_source import read_tensors
from tests.dist.cases import Run
from tests.dist.harness import WorkerError, Workers

# Rows that 4 and 2 ranks divide evenly, unevenly, and not at all.
SHAPES = {
    "model/even": (8, 5),
    "model/uneven": (10, 3),
    "model/few": (3, 4),
    "model/vector": (7,),
    "optimizer/exp_avg/even": (8, 5),
    "optimizer/step": (),
}
LAYOUTS = ("plain", "sharded", "hybrid")


def whole(step: int) -> dict[str, torch.Tensor]:
    """The full tensors of a step, the same on every rank and in every layout."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@cache  # a mesh makes process groups, and the workers live long
def mesh_of(layout: str) -> DeviceMesh:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size,) if layout == "sharded" else (2, size // 2))


def laid_out(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """`plain`: copies. `sharded`: by rows over all ranks. `hybrid`: 2 copies of shards."""
    if layout == "plain":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    mesh = mesh_of(layout)
    placements = [Shard(0)] if layout == "sharded" else [Replicate(), Shard(0)]
    return {
        name: distribute_tensor(
            tensor, mesh, placements if tensor.ndim else [Replicate()] * mesh.ndim
        )
        for name, tensor in tensors.items()
    }


def generator_of(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(1000 + rank).get_state()


def state_of(step: int, layout: str) -> TrainState:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return TrainState(
        step, laid_out(whole(step), layout), {"consumed": 3 * step}, {"cpu": generator_of(rank)}
    )


def blank(layout: str) -> TrainState:
    empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole(0).items()}
    return TrainState(0, laid_out(empty, layout))


def checkpointer(folder: Path, *, asynchronous: bool, files: Files | None = None) -> Checkpointer:
    return Checkpointer(
        folder,
        keep=2,
        asynchronous=asynchronous,
        model_files=lambda path: (path / "config.json").write_text("{}") and None,
        files=files,
    )


def assert_is(state: TrainState, step: int) -> None:
    expected = whole(step)
    assert state.step == step and state.scalars == {"consumed": 3 * step}
    for name, tensor in state.tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full.view(torch.int32), expected[name].view(torch.int32)), name


# What ranks do. Every function gets a folder and runs on all ranks of one group.


def save_all(folder: Path) -> None:
    for number, layout in enumerate(LAYOUTS):
        keeper = checkpointer(folder / layout, asynchronous=number % 2 == 0)
        keeper.save(state_of(number, layout))
        keeper.wait()


def load_all(folder: Path, saved_by: int) -> None:
    """Each checkpoint into each layout."""
    for number, saved in enumerate(LAYOUTS):
        keeper = checkpointer(folder / saved, asynchronous=False)
        latest = keeper.latest()
        assert latest is not None
        for layout in LAYOUTS:
            state = keeper.load(latest, blank(layout))
            assert_is(state, number)
            if saved_by == dist.get_world_size():
                assert torch.equal(state.rank_tensors["cpu"], generator_of(dist.get_rank()))
            else:
                assert state.rank_tensors == {}


def overlap(folder: Path) -> None:
    """Collectives of training and of the writing thread run at once; nothing meets or hangs."""
    keeper = checkpointer(folder, asynchronous=True, files=Slow())
    state = state_of(1, "sharded")
    keeper.save(state)
    steps = 0
    while keeper._pending is not None and steps < 50:
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == dist.get_world_size()
        for tensor in state.tensors.values():
            tensor.add_(1.0)
        steps += 1
    keeper.save(state_of(2, "sharded"))
    keeper.wait()
    assert_is(keeper.load(folder / "step-00000001", blank("plain")), 1)
    assert_is(keeper.load(folder / "step-00000002", blank("plain")), 2)


class Slow(Files):
    def before(self, operation: str, path: Path) -> None:
        if operation != "write":
            time.sleep(0.01)


class Full(Files):
    """The disk of one rank is full, at one kind of operation."""

    def __init__(self, rank: int, operation: str, name: str) -> None:
        self.broken = (rank, operation, name)

    def before(self, operation: str, path: Path) -> None:
        rank, broken, name = self.broken
        if dist.get_rank() == rank and operation == broken and name in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


def failures(folder: Path) -> None:
    """One rank cannot write: every rank raises the same, and the checkpoint before stands."""
    good = checkpointer(folder, asynchronous=False)
    good.save(state_of(1, "sharded"))
    last = dist.get_world_size() - 1
    for asynchronous in (False, True):
        for rank, operation, name in (
            (last, "create", f"__{last}_0.distcp"),
            (last, "write", f"__{last}_0.distcp"),
            (last, "sync", f"rng-{last}.pt"),
            (0, "write", ".metadata"),
            (0, "create", "manifest.json"),
            (0, "create", "latest.partial"),
            (0, "rename", "step-00000002.partial"),
        ):
            keeper = checkpointer(
                folder, asynchronous=asynchronous, files=Full(rank, operation, name)
            )
            message = None
            try:
                keeper.save(state_of(2, "sharded"))
                keeper.wait()
            except CheckpointError as error:
                message = str(error)
            messages: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(messages, message)
            assert len(set(messages)) == 1 and message is not None, messages
            assert f"{folder}/" in message and "No space left on device" in message, message
            assert "the latest is step-00000001" in message, message
            assert keeper.latest() == folder / "step-00000001"
            assert_is(keeper.load(folder / "step-00000001", blank("sharded")), 1)
            if dist.get_rank() == 0:
                assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000001"]
            dist.barrier()
    # In the background, the error waits for the next save and is then raised on every rank.
    keeper = checkpointer(folder, asynchronous=True, files=Full(last, "write", "__"))
    keeper.save(state_of(2, "sharded"))
    with pytest.raises(CheckpointError, match="No space left"):
        keeper.save(state_of(3, "sharded"))


def damage(folder: Path) -> None:
    """Whichever rank reads the damaged file, every rank hears of it."""
    keeper = checkpointer(folder, asynchronous=False)
    for step in (1, 2):
        keeper.save(state_of(step, "sharded"))
    names = sorted(path.name for path in (folder / "step-00000002").iterdir() if path.is_file())
    for name in names:
        if name == "manifest.json":
            continue
        path = folder / "step-00000002" / name
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(content[:-1])
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            keeper.load(folder / "step-00000002", blank("sharded"))
        messages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, str(caught.value))
        assert len(set(messages)) == 1
        assert f"{path} is truncated" in messages[0]
        assert "step-00000001, which was verified whole" in messages[0]
        if dist.get_rank() == 0:
            path.write_bytes(content)
        dist.barrier()
    assert_is(keeper.load(folder / "step-00000002", blank("plain")), 2)


def shares(folder: Path) -> None:
    """n copies stage and write an n-th each, plain or as replicas in a mesh."""
    size, rank = dist.get_world_size(), dist.get_rank()
    full = {f"model/{i}": torch.full((100, 100), float(i)) for i in range(4 * size)}
    for layout in ("plain", "hybrid"):
        state = TrainState(1, laid_out(full, layout))
        assert take_snapshot(state, rank, size, copy=True).nbytes == 4 * 40_000
        checkpointer(folder / layout, asynchronous=False).save(state)
        written = (folder / layout / "step-00000001" / f"__{rank}_0.distcp").stat().st_size
        assert 4 * 40_000 < written < 4 * 42_000


def disagree(folder: Path) -> None:
    state = state_of(1, "plain")
    if dist.get_rank() == 1:  # it lacks just what it would write
        for name in [n for n in state.tensors if zlib.crc32(n.encode()) % 2]:
            del state.tensors[name]
    with pytest.raises(CheckpointError, match="different names or shapes"):
        checkpointer(folder, asynchronous=False).save(state)
    assert find_latest(folder) is None


def die_while_saving(folder: Path) -> None:
    """Rank 1 is killed in the midst of the second save."""
    checkpointer(folder, asynchronous=False).save(state_of(1, "sharded"))
    files = Killed() if dist.get_rank() == 1 else None
    keeper = checkpointer(folder, asynchronous=True, files=files)
    started = time.monotonic()
    keeper.save(state_of(2, "sharded"))
    with pytest.raises(CheckpointError, match="saving was cut off"):
        keeper.wait()
    assert time.monotonic() - started < 30


class Killed(Files):
    def before(self, operation: str, path: Path) -> None:
        if operation == "sync":
            os.kill(os.getpid(), signal.SIGKILL)


def decoder_state(run: Run, step: int) -> TrainState:
    tensors = {f"model/{name}": value for name, value in run.axis.masters().items()}
    moments = {f"optimizer/{n}": value for n, value in run.optimizer.state_tensors().items()}
    return TrainState(step, tensors | moments, {"optimizer": run.optimizer.scalars()})


def decoder_steps(
    folder: Path, layout: str, start: int, stop: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train a small decoder from `start` (loaded, unless 0) to `stop` (saved): losses, state."""
    run = Run(layout)
    keeper = checkpointer(folder, asynchronous=True)
    if start:
        loaded = keeper.load(folder / f"step-{start:08d}", decoder_state(run, 0))
        run.optimizer.load_scalars(loaded.scalars["optimizer"])
        run.axis.publish()
    rows = []
    for number in range(start, stop):
        rows += run.steps(number, number + 1)
        keeper.save(decoder_state(run, number + 1))
    keeper.wait()
    return rows, run.state()


# Running them.

GetWorkers = Callable[[int], Workers]


def test_each_layout_loads_into_each_other_on_four_two_and_one_ranks(
    tmp_path: Path, workers: GetWorkers
) -> None:
    workers(4).run(save_all, tmp_path / "four")
    workers(2).run(load_all, tmp_path / "four", 4)
    for number, layout in enumerate(LAYOUTS):  # one process without a process group
        keeper = checkpointer(tmp_path / "four" / layout, asynchronous=False)
        latest = keeper.latest()
        assert latest is not None
        state = keeper.load(latest, blank("plain"))
        assert_is(state, number)
        assert state.rank_tensors == {}
        for name, tensor in read_tensors(tmp_path / "four" / layout):
            assert torch.equal(tensor, whole(number)[f"model/{name}"])


def test_the_same_layout_gets_its_generators_back_and_one_rank_loads_into_four(
    tmp_path: Path, workers: GetWorkers
) -> None:
    for number, layout in enumerate(LAYOUTS):
        state = TrainState(number, whole(number), {"consumed": 3 * number}, {})
        checkpointer(tmp_path / "one" / layout, asynchronous=False).save(state)
    workers(4).run(load_all, tmp_path / "one", 1)
    workers(2).run(save_all, tmp_path / "two")
    workers(2).run(load_all, tmp_path / "two", 2)


@pytest.mark.parametrize("work", [overlap, failures, damage, shares, disagree])
def test_on_two_ranks(tmp_path: Path, workers: GetWorkers, work: Callable[[Path], None]) -> None:
    workers(2).run(work, tmp_path / "checkpoints")


def test_a_decoder_goes_on_bit_for_bit_and_in_another_layout(
    tmp_path: Path, workers: GetWorkers
) -> None:
    folder = tmp_path / "checkpoints"
    on_two = workers(2).run
    ((uninterrupted, final), _) = on_two(decoder_steps, folder, "dp_shard=2,zero=3", 0, 4)
    ((resumed, state), _) = on_two(decoder_steps, folder, "dp_shard=2,zero=3", 3, 4)
    assert resumed == uninterrupted[3:]
    assert all(torch.equal(state[name], final[name]) for name in final)
    for layout in ("dp_replicate=2", "dp_shard=2,zero=1", ""):
        arguments = (folder, layout, 3, 4)
        rows = on_two(decoder_steps, *arguments)[0][0] if layout else decoder_steps(*arguments)[0]
        assert rows[0] == pytest.approx(uninterrupted[3], rel=1e-5), layout
    weights = dict(read_tensors(folder / "step-00000003"))
    assert {f"model/{name}" for name in weights} <= final.keys()


def test_a_rank_killed_while_saving_leaves_the_save_before(
    tmp_path: Path, workers: GetWorkers
) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(WorkerError, match=r"^rank 1 died$"):
        workers(2).run(die_while_saving, folder)
    assert find_latest(folder) == folder / "step-00000001"
    keeper = checkpointer(folder, asynchronous=False)
    assert [path.name for path in sorted(folder.iterdir())] == ["latest", "step-00000001"]
    assert_is(keeper.load(folder / "step-00000001", blank("plain")), 1)
