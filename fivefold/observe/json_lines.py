"""Append-only files of one JSON object a line, that survive a kill at any byte.

A line is handed to the kernel in one write. A process killed in between leaves a torn last line,
which the next writer cuts off and readers pass over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.core.errors import DataError, TrainingError

NOT_FINITE = "not_finite"  # the key that says which values were NaN or infinite, and written null


class JsonLines:
    """An open file to append to. Its records carry an increasing integer `step`."""

    def __init__(self, path: Path) -> None:
        """Open `path`, made if absent; cut off what a killed writer left unfinished at its end.

        Raises TrainingError when it cannot be opened or written, DataError when a line other
        than the last ones is damaged.
        """
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._cut(sum(length for length, _ in _whole_lines(path)))

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. NaN and infinities become null, named under `not_finite`."""
        line = encode_record(record) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        if written != len(line):  # what a nearly full disk does before it fails
            raise _cannot_write(self.path, OSError(None, "the disk took part of a line"))

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps: a resumed run is about to write them again."""
        kept = 0
        for length, record in _whole_lines(self.path):
            if record.get("step", 0) > step:
                break
            kept += length
        self._cut(kept)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _cut(self, size: int) -> None:
        try:
            if self.path.stat().st_size > size:
                self._file.truncate(size)
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of `path`, without a torn tail; none when the file does not exist.

    Raises DataError naming the file and line for damage before the tail.
    """
    return [record for _, record in _whole_lines(path)]


def encode_record(record: dict[str, Any]) -> bytes:
    """Strict JSON (RFC 8259 has no NaN) in UTF-8, on one line."""
    not_finite: dict[str, str] = {}
    plain = {key: _plain(value, key, not_finite) for key, value in record.items()}
    if not_finite:
        plain[NOT_FINITE] = not_finite
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")


def _plain(value: Any, where: str, not_finite: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v, f"{where}.{k}", not_finite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}.{i}", not_finite) for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[where] = str(value)
        return None
    return value


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes, record) of every whole line. Lines that no good one follows are the torn tail.

    A kill tears the last line alone; a machine that loses power may leave several (zeros).
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    damaged = 0
    with file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is None:
                damaged = damaged or number
            elif damaged:
                raise DataError(
                    f"{path} line {damaged} is not a JSON object", "delete that line, or restore it"
                )
            else:
                yield len(line), record


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError are both
        return None
    return record if isinstance(record, dict) else None


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"cannot write {path}: {error.strerror or error}",
        "free disk space or choose another --run-dir; the same command resumes the run",
    )
