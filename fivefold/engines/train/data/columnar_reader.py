"""Parquet files, and the Arrow files that `datasets` writes. Needs pyarrow, not `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivefold.core.config import SourceSection
from fivefold.core.errors import DataError, MissingExtraError
from fivefold.engines.train.data.documents import Document, Form, choose_form, to_document
from fivefold.engines.train.data.piece import Piece

PIECE_BYTES = 1 << 20
ROWS_AT_ONCE = 1024


def parquet_form(path: Path, section: SourceSection) -> Form:
    """By the columns of a Parquet file. Raises DataError for one that is missing or ill-typed."""
    with _opened_parquet(path) as file:
        return _form_of_schema(file.schema_arrow, path, section)


def parquet_pieces(path: Path, single: bool) -> Iterator[Piece]:
    """One piece a row group."""
    with _opened_parquet(path) as file:
        row = 1
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            yield Piece(str(path), group, group + 1, row, about.total_byte_size)
            row += about.num_rows


def read_parquet(piece: Piece, form: Form) -> Iterator[Document | None]:
    """The documents of a piece, read ROWS_AT_ONCE rows at a time."""
    path = Path(piece.path)
    with _opened_parquet(path) as file:
        _check_columns(file.schema_arrow, path, form)
        groups = list(range(piece.start, piece.stop))
        batches = file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=list(form.fields))
        yield from _documents(batches, form, path, piece.first)


def arrow_form(path: Path, section: SourceSection) -> Form:
    """By the columns of an Arrow stream file. Raises DataError as parquet_form."""
    with _opened_arrow(path) as reader:
        return _form_of_schema(reader.schema, path, section)


def arrow_pieces(path: Path, single: bool) -> Iterator[Piece]:
    """Runs of record batches of about PIECE_BYTES."""
    with _opened_arrow(path) as reader:
        start, first, size, row, stop = 0, 1, 0, 1, 0
        for stop, batch in enumerate(reader, 1):
            size += batch.nbytes
            row += batch.num_rows
            if size >= PIECE_BYTES:
                yield Piece(str(path), start, stop, first, size)
                start, first, size = stop, row, 0
        if stop > start:
            yield Piece(str(path), start, stop, first, size)


def read_arrow(piece: Piece, form: Form) -> Iterator[Document | None]:
    """The documents of a piece; the batches before it are skipped, not read (memory-mapped)."""
    path = Path(piece.path)
    with _opened_arrow(path) as reader:
        _check_columns(reader.schema, path, form)
        wanted = (
            batch.select(list(form.fields))
            for number, batch in zip(range(piece.stop), reader, strict=False)
            if number >= piece.start
        )
        yield from _documents(wanted, form, path, piece.first)


def _documents(
    batches: Iterator[Any], form: Form, path: Path, first: int
) -> Iterator[Document | None]:
    row = first
    for batch in batches:
        for record in batch.to_pylist():
            yield to_document(record, form, f"{path} row {row}")
            row += 1


def _form_of_schema(schema: Any, path: Path, section: SourceSection) -> Form:
    form = choose_form(schema.names, section, str(path))
    _check_columns(schema, path, form)
    return form


def _check_columns(schema: Any, path: Path, form: Form) -> None:
    import pyarrow.types as types

    wanted = "a list of messages" if form.kind == "chat" else "text"
    for name in form.fields:
        if name not in schema.names:
            raise DataError(
                f"{path} has no column {name!r}; its columns are: {', '.join(schema.names)}",
                "every file of a source has the same columns",
            )
        kind = schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        texts = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        lists = types.is_list(kind) or types.is_large_list(kind)
        if not (lists if form.kind == "chat" else texts):
            raise DataError(
                f"{path}: column {name!r} is {kind}, not {wanted}",
                "name another column, or convert it",
            )


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    _need_pyarrow(path)
    import pyarrow.parquet as parquet

    with _named_errors(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield file


@contextmanager
def _opened_arrow(path: Path) -> Iterator[Any]:
    _need_pyarrow(path)
    import pyarrow

    with _named_errors(path), pyarrow.memory_map(str(path)) as data:
        yield pyarrow.ipc.open_stream(data)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise DataError(
            f"cannot read {path}: {cause}", "the file is damaged; get it again"
        ) from None


def _need_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path}") from None
