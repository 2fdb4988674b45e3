"""Which tokenizer a run uses: the model's own, one from a folder, or one trained on the data."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from fivefold.core.config import DataSection, SourceSection
from fivefold.core.errors import ConfigError, DataError
from fivefold.engines.train.data.discover import SourceFiles, discover
from fivefold.engines.train.data.encode import document_hash
from fivefold.engines.train.data.files import locked, replacing
from fivefold.engines.train.data.prepare import data_cache
from fivefold.engines.train.data.stamps import content_hash, stamp_files
from fivefold.engines.train.data.tasks import source_form, tasks_of
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.open import load_tokenizer

# Enough text to learn a vocabulary from; more only takes longer.
TRAINING_BYTES = 32 << 20
SMALLEST_VOCABULARY = 260  # the 256 bytes and the special tokens
FORMAT = 1


def resolve_tokenizer(
    config: DataSection, model_tokenizer: Callable[[], Tokenizer] | None, folder: Path | None = None
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    `auto` is the model's own; `bpe:N` is trained once on the sources and kept under `folder`
    (None: the data cache) until they change; anything else is a folder, file or model name.
    Raises ConfigError when `auto` has no model to ask or N is no vocabulary size, DataError as
    `prepare` does, TokenizerError or WeightsError for a tokenizer that cannot be read.
    """
    name = config.tokenizer
    if name.startswith("bpe:"):
        return _trained(config, _vocabulary(name), folder or data_cache(config))
    if name != "auto":
        return load_tokenizer(name)
    if model_tokenizer is None:
        raise ConfigError(
            "data.tokenizer=auto takes the model's tokenizer, but the model is only a configuration",
            "set data.tokenizer=bpe:4096 to train one on the data, or name a tokenizer's folder",
        )
    return model_tokenizer()


def iterate_documents(config: DataSection, source: SourceSection) -> Iterator[str]:
    """The text of every document of `source`, in order (of a chat, that of its messages).

    Raises DataError naming file and line.
    """
    found = discover(source)
    for task in tasks_of(found, source_form(found)):
        for document in task.documents():
            if document is not None:
                yield document.plain()


def _vocabulary(name: str) -> int:
    number = name.removeprefix("bpe:")
    if not number.isdecimal() or int(number) < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"data.tokenizer={name!r} is not bpe:N with N of at least {SMALLEST_VOCABULARY}",
            "write e.g. bpe:4096",
        )
    return int(number)


def _trained(config: DataSection, vocabulary: int, cache: Path) -> Tokenizer:
    sources = [discover(section) for section in config.sources]
    key = _key(sources, cache)
    folder = cache / "tokenizers" / f"bpe-{vocabulary}-{key}"
    try:
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                texts = itertools.chain.from_iterable(
                    _sample(source, sources) for source in sources
                )
                tokenizer = Tokenizer.train_bpe(_at_most(texts, TRAINING_BYTES), vocabulary)
                with replacing(folder) as partial:
                    tokenizer.save(partial)
    except OSError as error:
        raise DataError(
            f"cannot write a tokenizer to {error.filename or folder}: {error.strerror}",
            "free space there, or set data.cache to another folder",
        ) from None
    return Tokenizer.from_folder(folder)


def _key(sources: list[SourceFiles], cache: Path) -> str:
    parts = [[source.key, content_hash(stamp_files(source, cache))] for source in sources]
    return hashlib.sha256(json.dumps([FORMAT, TRAINING_BYTES, parts]).encode()).hexdigest()[:16]


def _sample(source: SourceFiles, sources: list[SourceFiles]) -> Iterator[str]:
    """Documents of `source`, each taken or not by its own hash, so that what all sources give
    is about TRAINING_BYTES and comes from everywhere in them.
    """
    total = sum(file.stat().st_size for other in sources for file in other.files)
    limit = min(2**64, TRAINING_BYTES * 2**64 // max(total, 1))
    for task in tasks_of(source, source_form(source)):
        for document in task.documents():
            if document is not None and document_hash(document) < limit:
                yield document.plain()


def _at_most(texts: Iterator[str], limit: int) -> Iterator[str]:
    """Texts until they pass `limit` bytes: compressed sources hold more than their size says."""
    size = 0
    for text in texts:
        yield text
        size += len(text.encode())
        if size >= limit:
            return
