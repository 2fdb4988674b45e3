"""Text files.

In a folder each file is one document, unless it is so long that it is a collection. A file that
is a source by itself is cut, so that part of it can be held out and it can be read in parallel:
at the first blank line after every DOCUMENT_BYTES, else line end, else character.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from fivefold.core.config import SourceSection
from fivefold.core.errors import DataError
from fivefold.engines.train.data.documents import Document, Form, TextDocument
from fivefold.engines.train.data.piece import Piece

DOCUMENT_BYTES = 16 << 10
WHOLE_FILE_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
CUT_WINDOW_BYTES = 16 << 10
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_form(path: Path, section: SourceSection) -> Form:
    """A text file has no fields."""
    return Form("text", ())


def text_pieces(path: Path, single: bool) -> Iterator[Piece]:
    """Cut a long file; leave a shorter one of a folder whole."""
    size = path.stat().st_size
    if size <= (DOCUMENT_BYTES if single else WHOLE_FILE_BYTES):
        yield Piece(str(path), 0, size, 1, size)
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while start < size:
            stop = size if size - start <= PIECE_BYTES else next_cut(data, start + PIECE_BYTES)
            yield Piece(str(path), start, stop, 1, stop - start, DOCUMENT_BYTES)
            start = stop


def read_text(piece: Piece, form: Form) -> Iterator[Document | None]:
    """The documents of a piece. Raises DataError naming the line that is not UTF-8."""
    with Path(piece.path).open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.stop - piece.start)
    start = len(BYTE_ORDER_MARK) if piece.start == 0 and data.startswith(BYTE_ORDER_MARK) else 0
    while start < len(data):
        whole = not piece.cut or len(data) - start <= piece.cut
        stop = len(data) if whole else next_cut(data, start + piece.cut)
        try:
            text = data[start:stop].decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, start + error.start) from None
        yield TextDocument(piece.path, text)
        start = stop


def next_cut(data: bytes | mmap.mmap, at: int) -> int:
    """Where to cut at or shortly after `at`: after a blank line, a line, or a character."""
    for separator in (b"\n\n", b"\n"):
        found = data.find(separator, at, at + CUT_WINDOW_BYTES)
        if found >= 0:
            return found + len(separator)
    while at < len(data) and data[at] & 0xC0 == 0x80:  # inside a UTF-8 sequence
        at += 1
    return at


def _not_utf8(piece: Piece, offset: int) -> DataError:
    with Path(piece.path).open("rb") as file:
        before = file.read(piece.start + offset)
        wrong = file.read(1)
    return DataError(
        f"{piece.path} line {before.count(10) + 1}: byte 0x{wrong.hex()} "
        f"(at offset {len(before)}) is not UTF-8",
        "convert the file, e.g. with `iconv -t UTF-8`",
    )
