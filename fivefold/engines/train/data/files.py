"""Files that are either whole or not there, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


def write_atomically(path: Path, text: str) -> None:
    """Write `path` so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder to fill, which takes `folder`'s place when the block ends without error.

    Call it under a lock: what a killed process left is removed. Those who have files of the old
    folder open keep them.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    old = folder.with_name(f"{folder.name}.old")
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, give_way: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Hold the lock file `path`; wait while another process does. It dies with the process.

    While `give_way()` is true the lock is left to others, so that the process with the terminal
    gets the work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while give_way() and _is_free(file.fileno()):
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(POLL_SECONDS)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_free(descriptor: int) -> bool:
    """True when nobody works under the lock (now this process shares it).

    Shared: of several that give way at the same time none must take another for the one that works.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
