"""JSONL files: one JSON object a line, blank lines allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.core.config import SourceSection
from fivefold.core.errors import DataError
from fivefold.engines.train.data.documents import Document, Form, choose_form, to_document
from fivefold.engines.train.data.piece import Piece

PIECE_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def jsonl_form(path: Path, section: SourceSection) -> Form:
    """By the fields of the first record. Raises DataError when there is none or it is malformed."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line, path, number)
            if record is None:
                continue
            if not isinstance(record, dict):
                raise DataError(f"{path} line {number} is no object", "write one object a line")
            return choose_form(record, section, f"{path} line {number}")
    raise DataError(f"{path} holds only blank lines", "give a file that holds records")


def jsonl_pieces(path: Path, single: bool) -> Iterator[Piece]:
    """Pieces that end where lines end."""
    start, line = 0, 1
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            data += file.readline()
            yield Piece(str(path), start, start + len(data), line, len(data))
            start += len(data)
            line += data.count(b"\n")


def read_jsonl(piece: Piece, form: Form) -> Iterator[Document | None]:
    """The documents of a piece. Raises DataError naming file and line."""
    with Path(piece.path).open("rb") as file:
        file.seek(piece.start)
        lines = file.read(piece.stop - piece.start).split(b"\n")
    for number, line in enumerate(lines, piece.first):
        record = _parse(line, piece.path, number)
        if record is not None:
            yield to_document(record, form, f"{piece.path} line {number}")


def _parse(line: bytes, path: Path | str, number: int) -> Any:
    """The record of a line; None when it is blank. A record that is `null` is malformed."""
    if number == 1:
        line = line.removeprefix(BYTE_ORDER_MARK)
    line = line.strip()
    if not line:
        return None
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} line {number}: byte 0x{line[error.start]:02x} is not UTF-8",
            "convert the file, e.g. with `iconv -t UTF-8`",
        ) from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} line {number} is not JSON: {error.msg} at column {error.colno}",
            "write one object a line",
        ) from None
    except RecursionError:
        raise DataError(f"{path} line {number} is nested too deeply", "flatten it") from None
    if record is None:
        raise DataError(f"{path} line {number} is null", "write one object a line")
    return record
