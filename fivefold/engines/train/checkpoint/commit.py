"""Writing one checkpoint, from staged copies to the moment it counts."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fivefold.core.errors import CheckpointError, FivefoldError
from fivefold.engines.train.checkpoint.files import Files
from fivefold.engines.train.checkpoint.retention import clear_leftovers, prune
from fivefold.engines.train.checkpoint.snapshot import Outline, Snapshot
from fivefold.engines.train.checkpoint.team import Team
from fivefold.engines.train.checkpoint.writer import Digests, write_tensors
from fivefold.weights.checkpoint_manifest import (
    BEST,
    LATEST,
    MANIFEST,
    MODEL_FOLDER,
    PARTIAL,
    REPLACED,
    STATE,
    Manifest,
    find_latest,
    step_name,
)

_PER_PIECE_BYTES = 2048  # zip and alignment around each piece
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Save:
    """One save under way: the same calls, in the same order, on every rank."""

    checkpoints: Path
    snapshot: Snapshot
    best: bool
    keep: int
    layout: str
    model_files: Callable[[Path], None]
    team: Team
    files: Files

    @property
    def target(self) -> Path:
        """The checkpoint's folder once it is whole."""
        return self.checkpoints / step_name(self.snapshot.step)

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.target.with_name(self.target.name + PARTIAL)

    def run(self) -> None:
        """Write and commit. Raises the same CheckpointError on every rank.

        Whatever happens, `latest` and the folder it names are as before, or the new ones.
        """
        everywhere = self.team.gather(
            (self.snapshot.outline, self.snapshot.nbytes, len(self.snapshot.pieces))
        )
        needed = sum(nbytes + pieces * _PER_PIECE_BYTES for _, nbytes, pieces in everywhere)

        def describe(error: BaseException) -> CheckpointError:
            return self._describe(error, needed)

        if not _agree([outline for outline, _, _ in everywhere]):
            raise CheckpointError(
                f"{self.target} was not written: the ranks hold tensors of different names or "
                "shapes",
                "this is a defect of the program: please report it",
            )
        try:
            self.team.on_main(lambda: self._prepare(needed), describe)
            shares = self.team.gather(self.team.each(self._write_share, describe))
            self.team.on_main(lambda: self._commit(shares), describe)
        except FivefoldError:
            self.team.on_main(self._discard, describe)
            raise
        self.team.on_main(lambda: prune(self.checkpoints, self.keep, self.files), self._pruning)

    def _prepare(self, needed: int) -> None:
        self.files.make_folder(self.checkpoints)
        if self.partial.exists():
            self.files.remove(self.partial)
        # Better to say so now than to fill the disk under everything else that writes to it.
        if shutil.disk_usage(self.checkpoints).free < needed:
            raise OSError(errno.ENOSPC, "not enough space left", str(self.partial))
        self.files.make_folder(self.partial / MODEL_FOLDER)
        self.model_files(self.partial / MODEL_FOLDER)

    def _write_share(self) -> Digests:
        digests = write_tensors(self.snapshot, self.partial, self.team, self.files)
        name = f"rng-{self.team.rank}.pt"
        with self.files.create(self.partial / name) as file:
            torch.save(self.snapshot.rank_tensors, file)  # type: ignore[arg-type]
        return digests | {name: file.digest}

    def _commit(self, shares: list[Digests]) -> None:
        """Everything that takes space, then renames alone."""
        self._write_manifest(shares)
        names = [BEST, LATEST] if self.best else [LATEST]
        for name in names:
            pointer = self.checkpoints / (name + PARTIAL)
            self.files.write(pointer, f"{self.target.name}\n".encode())
        replaced = self.target.with_name(self.target.name + REPLACED)
        if self.target.exists():
            self.files.rename(self.target, replaced)
        self.files.rename(self.partial, self.target)
        self.files.sync_folder(self.checkpoints)
        for name in names:
            self.files.rename(self.checkpoints / (name + PARTIAL), self.checkpoints / name)
        self.files.sync_folder(self.checkpoints)
        if replaced.exists():
            self.files.remove(replaced)

    def _write_manifest(self, shares: list[Digests]) -> None:
        digests: Digests = {}
        for rank, share in enumerate(shares):
            self._check_visible(rank, share)
            digests |= share
        digests[STATE] = self.files.write(self.partial / STATE, self.snapshot.scalars)
        for path in sorted((self.partial / MODEL_FOLDER).rglob("*")):
            if path.is_file():
                digests[path.relative_to(self.partial).as_posix()] = self.files.adopt(path)
            else:
                self.files.sync_folder(path)
        self.files.sync_folder(self.partial / MODEL_FOLDER)
        manifest = Manifest(
            self.snapshot.step, self.team.size, self.layout, dict(sorted(digests.items()))
        )
        self.files.write(self.partial / MANIFEST, manifest.dumps().encode())
        self.files.sync_folder(self.partial)

    def _check_visible(self, rank: int, share: Digests) -> None:
        for name, digest in share.items():
            path = self.partial / name
            if not path.is_file() or path.stat().st_size != digest.size:
                raise CheckpointError(
                    f"{path}, written by rank {rank}, is not there for rank 0",
                    "put the run directory on a file system that all ranks share",
                )

    def _discard(self) -> None:
        """After a failure: give the space back. What cannot be removed goes at the next start."""
        with suppress(OSError):
            clear_leftovers(self.checkpoints, self.files)

    def _describe(self, error: BaseException, needed: int) -> CheckpointError:
        cause = _cause(error)
        if not isinstance(cause, OSError) or cause.strerror is None:
            return CheckpointError(
                f"{self.target} was not written ({type(cause).__name__}: {cause})",
                "if it stays, please report it",
            )
        space = ""
        if cause.errno in _FULL and self.checkpoints.is_dir():
            free = shutil.disk_usage(self.checkpoints).free
            space = f" ({needed:,} bytes needed, {free:,} free)"
        kept = find_latest(self.checkpoints)
        stays = f"the latest is {kept.name}" if kept else "there is no earlier one"
        mend = "free space there" if cause.errno in _FULL else "make it writable"
        return CheckpointError(
            f"cannot write {cause.filename or self.target}: {cause.strerror}{space}; {stays}",
            f"{mend}, then the same command resumes",
        )

    def _pruning(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"{self.target} is saved, but an old checkpoint cannot be removed: {_cause(error)}",
            "remove it by hand, or raise checkpoint.keep",
        )


def _agree(outlines: list[Outline]) -> bool:
    """Whether ranks that hold parts of one tensor describe it alike, and write it as a whole."""
    seen: dict[str, tuple[str, int]] = {}
    missing: dict[str, int] = {}
    for outline in outlines:
        for name, (words, elements, written) in outline.items():
            if seen.setdefault(name, (words, elements)) != (words, elements):
                return False
            missing[name] = missing.get(name, elements) - written
    return not any(missing.values())


def _cause(error: BaseException) -> BaseException:
    """What failed first, out of DCP's account of all ranks."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
