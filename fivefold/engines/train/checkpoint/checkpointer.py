"""Saving and loading the state of a run: sharded, in the background, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from fivefold.axes.part import Part
from fivefold.core.errors import CheckpointError
from fivefold.engines.train.checkpoint.background import Background
from fivefold.engines.train.checkpoint.commit import Save
from fivefold.engines.train.checkpoint.files import Files
from fivefold.engines.train.checkpoint.retention import clear_leftovers
from fivefold.engines.train.checkpoint.snapshot import TrainState, take_snapshot
from fivefold.engines.train.checkpoint.team import Team
from fivefold.weights.checkpoint_manifest import (
    STATE,
    FileDigest,
    Manifest,
    find_latest,
    other_choice,
    read_json,
    read_manifest,
)
from fivefold.weights.checkpoint_metadata import load_into, read_metadata, tensors_of
from fivefold.weights.checkpoint_verify import Damage, damage_error, find_damage

__all__ = ["Checkpointer", "TrainState"]


class Checkpointer:
    """Checkpoints of one run in `folder`. Every method is called on every rank.

    `keep`: newest ones kept, the best besides. `asynchronous`: `save` returns once the state is
    copied. `model_files(folder)` writes config.json and the tokenizer, on rank 0. `layout` is
    recorded for people to read. A folder belongs to one running job at a time: what another one
    left unfinished there is removed at the start.

    Raises CheckpointError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        asynchronous: bool,
        model_files: Callable[[Path], None],
        layout: str = "",
        files: Files | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        self._model_files = model_files
        self._layout = layout
        self._files = files or Files()
        self._here = Team()  # collectives of the calling thread
        self._writing = Team()  # collectives of the thread that writes
        self._pending: Background | None = None
        self._here.on_main(
            lambda: clear_leftovers(self.folder, self._files),
            lambda error: CheckpointError(
                f"cannot clear what a dead run left in {self.folder}: {error}", "make it writable"
            ),
        )

    def save(self, state: TrainState, *, best: bool = False) -> None:
        """Save `state`; with `best`, also as the best so far.

        Asynchronously, the tensors may change again once this returns. Call `wait` before the
        process ends. Raises CheckpointError, on every rank, when this save (or the one before,
        if asynchronous) failed; `latest` is then as it was.
        """
        self.wait()
        save = Save(
            checkpoints=self.folder,
            snapshot=take_snapshot(
                state, self._here.rank, self._here.size, copy=self._asynchronous
            ),
            best=best,
            keep=self._keep,
            layout=self._layout,
            model_files=self._model_files,
            team=self._writing,
            files=self._files,
        )
        if self._asynchronous:
            self._pending = Background(save.run, f"save {save.target.name}")
        else:
            save.run()

    def wait(self) -> None:
        """Wait for a save in the background. Raises its CheckpointError, on every rank."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def latest(self) -> Path | None:
        """The newest checkpoint that counts, the same on every rank; None when there is none."""
        return self._here.on_main(lambda: find_latest(self.folder), _unreadable(self.folder))

    def load(self, path: Path, state: TrainState) -> TrainState:
        """Fill `state.tensors` in place from a checkpoint of any layout, bit for bit.

        Returns the same tensors with the saved step and scalars, and this rank's own tensors if
        as many ranks run as saved (else none). Raises the same CheckpointError on every rank:
        for a missing, truncated or corrupt file, or tensors that are not the state's.
        """
        describe = _unreadable(path)
        manifest = self._here.each(lambda: read_manifest(path), describe)
        self._verify(path, manifest)
        metadata = self._here.each(
            lambda: _matching_metadata(path, manifest, state.tensors), describe
        )
        self._refuse_more(path, metadata, state.tensors)
        load_into(state.tensors, path, metadata, self._here.group)
        return self._here.each(lambda: self._read_rest(path, manifest, state), describe)

    def _refuse_more(
        self, path: Path, metadata: Metadata, tensors: Mapping[str, Tensor | Part]
    ) -> None:
        """Raise CheckpointError for a tensor that no rank has a place for."""
        wanted = {name for names in self._here.gather(sorted(tensors)) for name in names}
        if more := sorted(tensors_of(metadata).keys() - wanted):
            raise CheckpointError(f"{path} holds {more[0]}, which this run has not", MEND)

    def _read_rest(self, path: Path, manifest: Manifest, state: TrainState) -> TrainState:
        saved = read_json(path, STATE)
        same_world = manifest.world_size == self._here.size
        return TrainState(
            step=saved["step"],
            tensors=state.tensors,
            scalars=saved["scalars"],
            rank_tensors=_rank_tensors(path, self._here.rank) if same_world else {},
        )

    def _verify(self, path: Path, manifest: Manifest) -> None:
        """Each rank reads a share of the files, of about equal size."""
        share = _share(manifest.files, self._here.rank, self._here.size)
        found = self._here.gather(find_damage(path, share))
        damage: list[Damage] = sorted(item for part in found for item in part)
        if damage:
            raise self._here.on_main(
                lambda: damage_error(path, manifest, damage), _unreadable(path)
            )


def _unreadable(path: Path) -> Callable[[BaseException], CheckpointError]:
    return lambda error: CheckpointError(
        f"cannot read {path} ({type(error).__name__}: {error})", "use another checkpoint"
    )


def _share(files: dict[str, FileDigest], rank: int, size: int) -> list[tuple[str, FileDigest]]:
    loads = [0] * size
    mine = []
    for name, digest in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        reader = loads.index(min(loads))
        loads[reader] += digest.size
        if reader == rank:
            mine.append((name, digest))
    return mine


MEND = "resume with the configuration that wrote it, or start another run"


def _matching_metadata(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Part]
) -> Metadata:
    metadata = read_metadata(path, manifest)
    held = tensors_of(metadata)
    for name, tensor in sorted(tensors.items()):
        if name not in held:
            raise CheckpointError(f"{path} holds no tensor {name}", MEND)
        saved = held[name]
        if saved.size != tensor.shape or saved.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path} holds {name} as {_words(saved.size, saved.properties.dtype)}, "
                f"this run has {_words(tensor.shape, tensor.dtype)}",
                MEND,
            )
    return metadata


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _rank_tensors(path: Path, rank: int) -> dict[str, Tensor]:
    file = path / f"rng-{rank}.pt"
    try:
        # weights_only: tensors and plain containers, never code.
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"cannot read {file}: {error}", other_choice(path)) from None
