"""Every change that saving makes on disk: hashed as it is written, and synced before it counts."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fivefold.weights.checkpoint_manifest import FileDigest, hash_file


class HashedFile:
    """An output file that keeps the SHA-256 of what was written, and the error that stopped it.

    The digest is of the bytes handed in, so damage on the way to the disk shows when verified.
    """

    def __init__(self, raw: IO[bytes], path: Path, files: Files) -> None:
        self.error: OSError | None = None
        self._raw = raw
        self._path = path
        self._files = files
        self._sha256 = hashlib.sha256()
        self._size = 0

    @property
    def digest(self) -> FileDigest:
        """Size and hash of everything written so far."""
        return FileDigest(self._size, self._sha256.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`. Raises OSError carrying the path."""
        view = memoryview(data).cast("B")
        self.check()
        try:
            self._files.before("write", self._path)
            self._raw.write(view)
        except OSError as error:
            # torch.save turns it into a RuntimeError without the cause: kept for whoever asks.
            self.error = OSError(error.errno, error.strerror, str(self._path))
            raise self.error from None
        self._sha256.update(view)
        self._size += len(view)
        return len(view)

    def check(self) -> None:
        """Raise the OSError of an earlier write, if any failed."""
        if self.error is not None:
            raise self.error

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing: the file is flushed and synced as a whole when it is closed."""

    def close(self) -> None:
        """Nothing: `Files.create` closes it."""


class Files:
    """File operations of a save. `before` is called ahead of each: tests fail or end it there."""

    def before(self, operation: str, path: Path) -> None:
        """Called ahead of every operation; does nothing."""

    @contextmanager
    def create(self, path: Path) -> Iterator[HashedFile]:
        """A new file, on disk when the context ends. Raises OSError carrying the path."""
        with self._at(path):
            self.before("create", path)
            with path.open("wb") as raw:
                file = HashedFile(raw, path, self)
                try:
                    yield file
                finally:
                    file.check()
                self.before("sync", path)
                raw.flush()
                os.fsync(raw.fileno())

    def write(self, path: Path, data: bytes) -> FileDigest:
        """Create `path` holding `data`, synced."""
        with self.create(path) as file:
            file.write(data)
        return file.digest

    def adopt(self, path: Path) -> FileDigest:
        """Sync and hash a file that somebody else wrote."""
        with self._at(path):
            self.before("sync", path)
            with path.open("rb") as raw:
                os.fsync(raw.fileno())
            return FileDigest(path.stat().st_size, hash_file(path))

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        with self._at(path):
            self.before("make", path)
            path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder survive a power cut."""
        with self._at(path):
            self.before("sync", path)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
                    raise
            finally:
                os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename within one file system, atomically."""
        with self._at(old):
            self.before("rename", old)
            old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with what is in it (never following links out of it)."""
        with self._at(path):
            if path.is_dir() and not path.is_symlink():
                for child in path.iterdir():
                    self.remove(child)
                self.before("remove", path)
                path.rmdir()
            else:
                self.before("remove", path)
                with suppress(FileNotFoundError):
                    path.unlink()

    @contextmanager
    def _at(self, path: Path) -> Iterator[None]:
        """Give errors of a file operation the path that some of them lack."""
        try:
            yield
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
