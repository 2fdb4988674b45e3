"""Tokenize one source into a folder of shards that is there only when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fivefold.core.errors import DataError
from fivefold.engines.train.data.discover import SourceFiles
from fivefold.engines.train.data.encode import token_dtype
from fivefold.engines.train.data.files import replacing
from fivefold.engines.train.data.manifest import FORMAT, Manifest
from fivefold.engines.train.data.shards import ShardWriter
from fivefold.engines.train.data.stamps import Stamp, content_hash
from fivefold.engines.train.data.tasks import Task, source_form, tasks_of
from fivefold.engines.train.data.workers import InProcess, Runner, worker_pool
from fivefold.text.tokenizer import Tokenizer

# Below this, processes take longer to start than they save.
PARALLEL_BYTES = 16 << 20
T = TypeVar("T")
Advance = Callable[[str, int, int], None]


def build(
    source: SourceFiles,
    stamps: tuple[Stamp, ...],
    tokenizer: Tokenizer,
    folder: Path,
    workers: int,
    progress: bool,
) -> None:
    """Read `source` through once to find what is wrong with it, then tokenize it into `folder`.

    Call it under a lock. Raises DataError naming file and line, and when a file changes
    meanwhile.
    """
    form = source_form(source)
    tasks = list(tasks_of(source, form))
    size = sum(task.bytes for task in tasks)
    with replacing(folder) as partial, _shown(source.name, size, progress) as show:
        with _runner(tokenizer, workers if size >= PARALLEL_BYTES else 1, partial) as runner:
            counts = _followed(runner.check(tasks), tasks, "checking", show)
            if not sum(counts):
                raise DataError(f"data source {source.name} holds no text", "its records are empty")
            writer = ShardWriter(partial, token_dtype(tokenizer.vocab_size), form.has_answers)
            empty = 0
            for encoded in _followed(runner.encode(tasks), tasks, "tokenizing", show):
                writer.append(encoded)
                empty += encoded.empty
            writer.close()
        _check_unchanged(source, stamps)
        Manifest(
            format=FORMAT,
            source=source.name,
            source_sha256=content_hash(stamps),
            files={stamp.name: stamp.sha256 for stamp in stamps},
            tokenizer=tokenizer.fingerprint(),
            dtype=token_dtype(tokenizer.vocab_size).__name__,
            form=form.kind,
            documents=sum(entry.documents for entry in writer.entries),
            tokens=sum(entry.tokens for entry in writer.entries),
            empty_records=empty,
            shards=tuple(writer.entries),
        ).write(partial)


@contextmanager
def _runner(tokenizer: Tokenizer, workers: int, partial: Path) -> Iterator[Runner]:
    if workers == 1:
        yield InProcess(tokenizer)
        return
    scratch = partial / "scratch"
    scratch.mkdir()
    with worker_pool(workers, tokenizer, scratch) as pool:
        yield pool
    shutil.rmtree(scratch)


def _check_unchanged(source: SourceFiles, stamps: tuple[Stamp, ...]) -> None:
    for file, stamp in zip(source.files, stamps, strict=True):
        now = file.stat()
        if (now.st_size, now.st_mtime_ns) != (stamp.bytes, stamp.modified_ns):
            raise DataError(f"{file} changed while it was tokenized", "start again")


def _followed(results: Iterator[T], tasks: list[Task], doing: str, show: Advance) -> Iterator[T]:
    total = sum(task.bytes for task in tasks)
    done = 0
    show(doing, 0, total)
    for result, task in zip(results, tasks, strict=True):
        yield result
        done += task.bytes
        show(doing, done, total)


@contextmanager
def _shown(name: str, size: int, progress: bool) -> Iterator[Advance]:
    if not progress:
        yield lambda doing, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(name, total=size)

        def advance(doing: str, done: int, total: int) -> None:
            if not done:
                bar.reset(line)
            bar.update(line, description=f"{doing} {name}", completed=done, total=total)

        yield advance
