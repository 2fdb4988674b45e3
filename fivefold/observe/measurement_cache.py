"""Measurements of a machine, taken once and kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivefold.core.environment import cache_folder

# Longer than any measurement takes: whoever holds the lock after that is stopped or stuck.
LOCK_SECONDS = 10.0
LOCK_POLL_SECONDS = 0.05


def remembered(
    key: dict[str, Any],
    measure: Callable[[], dict[str, Any]],
    *,
    worth_keeping: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """What `measure` found when first asked under `key`, else what it finds now.

    Processes that ask at the same time take turns, so that one measures undisturbed and the
    others read its result. A cache that cannot be read or written is done without.
    """
    folder = cache_folder() / "measurements"
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{key['what']}-{name}.json"
    kept = _read(path, key)
    if kept is not None:
        return kept
    with _turn(folder):
        kept = _read(path, key)
        if kept is not None:
            return kept
        value = measure()
        if worth_keeping(value):
            _write(path, {"key": key, "value": value})
        return value


def _read(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and found.get("key") == key
    return found["value"] if whole and isinstance(found.get("value"), dict) else None


def _write(path: Path, found: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where there can be one, for at most as long as that helps."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    except OSError:
        yield
        return
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
            except OSError:  # a file system without locks
                break
        yield
