"""Parts of files: what one tokenizing process takes at a time.

A source's files become pieces in a fixed order; the documents of all pieces in that order are
the source's documents, whoever reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fivefold.engines.train.data.columnar_reader import (
    arrow_form,
    arrow_pieces,
    parquet_form,
    parquet_pieces,
    read_arrow,
    read_parquet,
)
from fivefold.engines.train.data.discover import SourceFiles
from fivefold.engines.train.data.documents import Document, Form
from fivefold.engines.train.data.jsonl_reader import jsonl_form, jsonl_pieces, read_jsonl
from fivefold.engines.train.data.piece import Piece
from fivefold.engines.train.data.text_reader import read_text, text_form, text_pieces

TASK_BYTES = 1 << 20

_FORMS = {"text": text_form, "jsonl": jsonl_form, "parquet": parquet_form, "arrow": arrow_form}
_CUTS = {
    "text": text_pieces,
    "jsonl": jsonl_pieces,
    "parquet": parquet_pieces,
    "arrow": arrow_pieces,
}
_READERS = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet, "arrow": read_arrow}


@dataclass(frozen=True)
class Task:
    """Pieces that are read one after the other, about TASK_BYTES together."""

    kind: str
    form: Form
    pieces: tuple[Piece, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Size on disk, for progress."""
        return sum(piece.bytes for piece in self.pieces)

    def documents(self) -> Iterator[Document | None]:
        """The documents; None for each record without text. Raises DataError naming the place."""
        for piece in self.pieces:
            yield from _READERS[self.kind](piece, self.form)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Task:
        """The inverse of to_json."""
        form = Form(values["form"]["kind"], tuple(values["form"]["fields"]))
        return cls(values["kind"], form, tuple(Piece(**piece) for piece in values["pieces"]))


def source_form(source: SourceFiles) -> Form:
    """How the records of `source` are read, by its first file. Raises DataError."""
    first = next(file for file in source.files if file.stat().st_size)
    return _FORMS[source.kind](first, source.section)


def tasks_of(source: SourceFiles, form: Form) -> Iterator[Task]:
    """All of `source`, in order, as tasks of about TASK_BYTES."""
    held: list[Piece] = []
    for piece in _all_pieces(source):
        if held and sum(p.bytes for p in held) + piece.bytes > TASK_BYTES:
            yield Task(source.kind, form, tuple(held))
            held = []
        held.append(piece)
    if held:
        yield Task(source.kind, form, tuple(held))


def _all_pieces(source: SourceFiles) -> Iterator[Piece]:
    for file in source.files:
        if file.stat().st_size:
            yield from _CUTS[source.kind](file, source.single)
