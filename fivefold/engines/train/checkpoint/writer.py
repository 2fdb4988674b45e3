"""The tensors of a checkpoint, written through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import queue
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fivefold.engines.train.checkpoint.files import Files
from fivefold.engines.train.checkpoint.snapshot import Snapshot
from fivefold.engines.train.checkpoint.team import Team
from fivefold.weights.checkpoint_manifest import FileDigest


def write_tensors(snapshot: Snapshot, folder: Path, team: Team, files: Files) -> Digests:
    """Write every rank's pieces and `.metadata` into `folder`; digests of this rank's files.

    Raises what failed, on every rank: OSError inside DCP's CheckpointException.
    """
    system = _HashingFileSystem(folder, files)
    dcp.save(
        {},  # the planner has it
        storage_writer=_Writer(folder, system),
        planner=_SnapshotPlanner(snapshot),
        process_group=team.group,
        no_dist=team.group is None,
    )
    return system.digests


Digests = dict[str, FileDigest]


class _SnapshotPlanner(dcp.DefaultSavePlanner):
    """Plans from a snapshot, which knows each piece's place, instead of from live DTensors."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for item, _ in self._snapshot.pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._snapshot.pieces[write_item.index][1]


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, with model and optimizer in files of their own.

    Generating from a checkpoint then reads and verifies a third of it.
    """

    def __init__(self, folder: Path, system: FileSystem) -> None:
        # Files are synced by `Files`, after their last flush.
        super().__init__(folder, sync_files=False)
        self.fs = system

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        groups: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            groups.setdefault(item.index.fqn.partition("/")[0], []).append(item)
        work: queue.Queue[Any] = queue.Queue()
        for number, items in enumerate(groups.values()):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            work.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, work)

    def storage_meta(self) -> StorageMeta:
        # Without DCP's random id and the folder's path, equal states give equal files.
        return StorageMeta()


class _HashingFileSystem(FileSystem):
    """DCP's file operations through `Files`, collecting the digest of each file."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.digests: Digests = {}
        self._folder = folder
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with self._files.create(Path(path)) as file:
            yield file
        self.digests[self._name(path)] = file.digest

    def rename(self, path: Any, new_path: Any) -> None:
        self._files.rename(Path(path), Path(new_path))
        self.digests[self._name(new_path)] = self.digests.pop(self._name(path))

    def mkdir(self, path: Any) -> None:
        """Nothing: rank 0 made the folder before."""

    def rm_file(self, path: Any) -> None:
        self._files.remove(Path(path))

    def _name(self, path: Any) -> str:
        return Path(path).relative_to(self._folder).as_posix()
