"""Recorded load: when requests came, how long they were, what they shared.

Azure: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset 2023, Splitwise).
Mooncake: JSONL with timestamp (ms), input_length, output_length, hash_ids (FAST 25): equal
hash_ids are equal blocks of 512 tokens, and equal beginnings are equal lists of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from fivefold.engines.serve.load.errors import LoadError

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash_ids stands for."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `at`: seconds after the trace's first. `blocks`: ids of what it shares."""

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_azure(path: Path) -> list[TraceRow]:
    """Rows in order of time. Raises LoadError naming the line that is wrong."""
    rows = []
    with _opened(path) as file:
        lines = csv.reader(file)
        header = next(lines, [])
        if header != AZURE_COLUMNS:
            raise LoadError(
                f"{path} line 1 is {','.join(header)!r}, no Azure trace",
                f"its first line must be {','.join(AZURE_COLUMNS)}",
            )
        for fields in lines:
            if fields:
                rows.append(_azure_row(fields, f"{path} line {lines.line_num}"))
    return _in_time(rows, path)


def read_mooncake(path: Path) -> list[TraceRow]:
    """Rows in order of time. Raises LoadError naming the line that is wrong."""
    rows = []
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_mooncake_row(line, f"{path} line {number}"))
    return _in_time(rows, path)


def _azure_row(fields: list[str], where: str) -> TraceRow:
    if len(fields) != len(AZURE_COLUMNS):
        raise LoadError(f"{where} has {len(fields)} fields, not 3", "mend or delete that line")
    when, fraction = fields[0].partition(".")[::2]
    try:
        moment = datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()
        moment += float(f"0.{fraction or 0}")  # 100 ns: more digits than datetime keeps
    except ValueError:
        raise LoadError(f"{where} has no time: {fields[0]!r}", "mend or delete that line") from None
    tokens, answer = (_count(fields[place], AZURE_COLUMNS[place], where) for place in (1, 2))
    return TraceRow(moment, tokens, answer)


def _mooncake_row(line: str, where: str) -> TraceRow:
    try:
        row = json.loads(line)
    except ValueError:
        raise LoadError(f"{where} is not JSON", "mend or delete that line") from None
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    missing = [name for name in names if not isinstance(row, dict) or name not in row]
    if missing:
        raise LoadError(f"{where} has no {missing[0]}", "give a trace in Mooncake's format")
    at = row["timestamp"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise LoadError(f"{where} has timestamp {at!r}", "give milliseconds")
    blocks = row["hash_ids"]
    if not isinstance(blocks, list) or any(type(b) is not int or b < 0 for b in blocks):
        raise LoadError(f"{where} has hash_ids that are no list of numbers", "mend that line")
    tokens, answer = (_count(row[name], name, where) for name in names[1:3])
    if len(blocks) * MOONCAKE_BLOCK < tokens:
        raise LoadError(
            f"{where} has {len(blocks)} hash_ids, too few for {tokens} tokens in blocks of"
            f" {MOONCAKE_BLOCK}",
            "mend or delete that line",
        )
    return TraceRow(at / 1000, tokens, answer, tuple(blocks))


def _count(value: Any, name: str, where: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0 or isinstance(value, float | bool):
        raise LoadError(f"{where} has {name} {value!r}", "give a whole number")
    return count


def _in_time(rows: list[TraceRow], path: Path) -> list[TraceRow]:
    if not rows:
        raise LoadError(f"{path} holds no request", "give a whole trace")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    return [TraceRow(r.at - start, r.input_tokens, r.output_tokens, r.blocks) for r in rows]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A text file whose errors are one line."""
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}", "check the path") from None
    with file:
        try:
            yield file
        except (UnicodeDecodeError, csv.Error):
            raise LoadError(f"{path} is no UTF-8 text", "give a trace") from None
