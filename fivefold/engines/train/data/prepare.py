"""Tokenize what is not tokenized yet, once for all processes, and open it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from fivefold.core.config import DataSection
from fivefold.core.environment import cache_folder, read_ranks
from fivefold.core.errors import DataError
from fivefold.engines.train.data.build import build
from fivefold.engines.train.data.corpus import Corpus
from fivefold.engines.train.data.discover import SourceFiles, discover
from fivefold.engines.train.data.files import locked
from fivefold.engines.train.data.manifest import NAME, Manifest
from fivefold.engines.train.data.shards import TokenizedSource
from fivefold.engines.train.data.stamps import Stamp, content_hash, stamp_files
from fivefold.text.tokenizer import Tokenizer

GIVE_WAY_SECONDS = 10.0


def data_cache(config: DataSection) -> Path:
    """The folder of tokenized shards, trained tokenizers and file hashes."""
    return Path(config.cache).expanduser() if config.cache else cache_folder() / "data"


def prepare(config: DataSection, tokenizer: Tokenizer, *, progress: bool) -> Corpus:
    """The corpus of `config`, tokenized where that was not done or a source has changed since.

    Any number of processes may call this at once: one works, the others wait for it. Raises
    DataError naming file and line for sources that cannot be read, and files of shards that are
    damaged; all sources are found before any is tokenized, each is read through before it is.
    """
    found = [discover(section) for section in config.sources]
    with _disk_errors(data_cache(config)):
        sources = tuple(_prepare(source, config, tokenizer, progress) for source in found)
    weights = tuple(Fraction(str(section.weight)) for section in config.sources)
    padding = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_ids[0]
    return Corpus(sources, weights, config.evaluation_share, padding)


def _prepare(
    source: SourceFiles, config: DataSection, tokenizer: Tokenizer, progress: bool
) -> TokenizedSource:
    cache = data_cache(config)
    folder = cache / "tokens" / tokenizer.fingerprint()[:16] / source.key
    with locked(folder.with_name(f"{source.key}.lock"), give_way=_to_the_first_rank(folder)):
        stamps = stamp_files(source, cache)
        manifest = Manifest.read(folder)
        if manifest is None or _is_stale(manifest, stamps, tokenizer, source):
            build(source, stamps, tokenizer, folder, _workers(config), progress)
            manifest = Manifest.read(folder)
        assert manifest is not None
        opened = TokenizedSource(folder, manifest)
    ranks = read_ranks()
    opened.verify(ranks.local_rank, ranks.local_world_size)
    return opened


def _is_stale(
    manifest: Manifest, stamps: tuple[Stamp, ...], tokenizer: Tokenizer, source: SourceFiles
) -> bool:
    if manifest.tokenizer != tokenizer.fingerprint():  # the folder's name holds part of it only
        return True
    if manifest.source_sha256 == content_hash(stamps):
        return False
    change = manifest.changed_file({stamp.name: stamp.sha256 for stamp in stamps})
    print(f"data source {source.name} has changed ({change}): tokenizing it again", file=sys.stderr)
    return True


def _workers(config: DataSection) -> int:
    return config.workers or len(os.sched_getaffinity(0))


def _to_the_first_rank(folder: Path) -> Callable[[], bool]:
    """True for a while on later ranks, when there is work: the first one has the progress bar."""
    deadline = time.monotonic() + GIVE_WAY_SECONDS
    waits = read_ranks().local_rank > 0
    return lambda: waits and not (folder / NAME).exists() and time.monotonic() < deadline


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write tokenized data to {error.filename or cache}: {error.strerror}",
            "free space there, or set data.cache to another folder",
        ) from None
