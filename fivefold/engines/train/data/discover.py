"""From a source in the configuration to its kind and its files, in a fixed order."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.config import SourceSection
from fivefold.core.errors import DataError, nearest

# Left out of the `stdlib` corpus: what distributions leave out or put in by their own choice,
# tests, and files that are tables rather than text.
STDLIB_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "__phello__", "test", "tests", "idle_test",
    "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "pydoc_data",
    "encodings",
}  # fmt: skip
FILE_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "datasets"}
REFUSED_SUFFIXES = {
    ".json": "write one object a line and name it .jsonl",
    ".gz": "unpack it",
    ".zst": "unpack it",
    ".bz2": "unpack it",
    ".xz": "unpack it",
    ".zip": "unpack it",
    ".csv": "turn it into JSONL or Parquet",
    ".pkl": "pickles are never read: turn it into JSONL or Parquet",
}
TRAINING_FILE = re.compile(r"train", re.IGNORECASE)
HELD_BACK_FILE = re.compile(r"(test|dev|val|valid|validation|eval)([-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class SourceFiles:
    """A source found on disk: its kind is one of text, jsonl, parquet, arrow."""

    section: SourceSection
    kind: str
    root: Path
    files: tuple[Path, ...]
    key: str

    @property
    def name(self) -> str:
        """For people: the source as the configuration names it."""
        return self.section.path

    @property
    def single(self) -> bool:
        """True when the source is one file, not a folder."""
        return self.files == (self.root,)

    def relative(self, file: Path) -> str:
        """A file's name inside the source."""
        return file.name if self.single else file.relative_to(self.root).as_posix()


def discover(section: SourceSection) -> SourceFiles:
    """Find the files of a source, sorted by name.

    Raises DataError for a path that does not exist, cannot be read, holds no file of its kind,
    or holds only empty ones.
    """
    if section.kind == "stdlib" or (section.kind == "auto" and section.path == "stdlib"):
        kind, root, files = "text", *_stdlib()
    else:
        root = Path(section.path).expanduser().absolute()
        if not root.exists():
            raise DataError(f"data source {root} does not exist", _near(root))
        kind, files = _file(root, section) if root.is_file() else _folder(root, section)
    try:
        empty = all(file.stat().st_size == 0 for file in files)
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}", "make it readable"
        ) from None
    if empty:
        what = (
            f"{root} is empty" if files == [root] else f"the {len(files)} files of {root} are empty"
        )
        raise DataError(what, "give a source that holds text")
    return SourceFiles(section, kind, root, tuple(files), _key(section, kind, root))


def _key(section: SourceSection, kind: str, root: Path) -> str:
    """A folder name that only the same way of reading the same path has."""
    reading = section.model_dump(include={"field", "prompt", "completion", "messages", "pattern"})
    text = json.dumps([kind, str(root), reading], sort_keys=True)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(section.path).name).strip(".-")[:40]
    return f"{readable or 'source'}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _stdlib() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))

    files: list[Path] = []
    for folder, below, names in os.walk(root):
        # Pruned while walking: site-packages alone may hold more files than all the rest.
        below[:] = [b for b in below if b not in STDLIB_LEFT_OUT and not b.startswith("config-")]
        files += [
            Path(folder, n) for n in names if n.endswith(".py") and n[:15] != "_sysconfigdata_"
        ]
    files.sort()
    if not files:
        raise DataError(
            f"this Python keeps no source of its standard library in {root}",
            "set data.sources to a text of your own",
        )
    return root, files


def _file(path: Path, section: SourceSection) -> tuple[str, list[Path]]:
    kind: str = section.kind
    if kind == "auto" and path.suffix in REFUSED_SUFFIXES:
        raise DataError(f"{path} is no text, JSONL or Parquet", REFUSED_SUFFIXES[path.suffix])
    if kind == "auto":
        kind = FILE_KINDS.get(path.suffix, "text")
    if kind == "datasets":
        kind = "parquet" if path.suffix == ".parquet" else "arrow"
    return kind, [path]


def _folder(root: Path, section: SourceSection) -> tuple[str, list[Path]]:
    kind = section.kind
    saved = (root / "state.json").is_file() or (root / "dataset_dict.json").is_file()
    if kind == "datasets" or (kind == "auto" and saved):
        return (
            ("arrow", _saved_dataset(root))
            if saved
            else ("parquet", _tables(root, section, "parquet"))
        )
    if kind == "auto":
        holding = [k for k in ("parquet", "jsonl") if next(root.rglob(f"*.{k}"), None)]
        if len(holding) == 2:
            raise DataError(f"{root} holds both Parquet and JSONL", "set the source's `kind`")
        if holding:
            return holding[0], _tables(root, section, holding[0])
    if kind in ("jsonl", "parquet"):
        return kind, _tables(root, section, kind)
    return "text", _matching(root, section.pattern)


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        files = sorted(file for file in root.glob(pattern) if file.is_file())
    except (ValueError, NotImplementedError):
        raise DataError(f"{pattern!r} is no file pattern", "write e.g. `**/*.txt`") from None
    if files:
        return files
    there = Counter(file.suffix or file.name for file in root.rglob("*") if file.is_file())
    listed = ", ".join(f"{count} *{suffix}" for suffix, count in there.most_common(4))
    raise DataError(
        f"{root} holds no file like {pattern!r}" + (f" (it holds {listed})" if there else ""),
        "set the source's `pattern`, e.g. `**/*.md`" if there else "the folder is empty",
    )


def _tables(root: Path, section: SourceSection, kind: str) -> list[Path]:
    own = section.pattern != SourceSection.model_fields["pattern"].default
    if own:
        return _matching(root, section.pattern)
    return _training_files(_matching(root, f"**/*.{kind}"))


def _training_files(files: list[Path]) -> list[Path]:
    """Where files are named by split, those for training: `test-…` is not to be learnt."""
    training = [file for file in files if TRAINING_FILE.match(file.name)]
    others = [file for file in files if HELD_BACK_FILE.match(file.name)]
    return [file for file in files if file not in set(others)] if training and others else files


def _saved_dataset(root: Path) -> list[Path]:
    """Arrow files of a folder that `datasets` wrote with save_to_disk."""
    if not (root / "state.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or "train" not in splits:
            raise DataError(
                f"{root} holds the splits {_names(splits)}, but no 'train'",
                "name one: the source's path is FOLDER/SPLIT",
            )
        root = root / "train"
    state = _json(root / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(f"{root} keeps an index beside its rows", "save it after flatten_indices()")
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    names = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    if not names:
        raise DataError(f"{root / 'state.json'} names no data files", "save the dataset again")
    files = []
    for name in names:
        # The folder came from elsewhere: its list must not lead out of it.
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(
                f"{root / 'state.json'} names {name!r}, which is outside its folder",
                "do not trust it",
            )
        if not (root / name).is_file():
            raise DataError(f"{root / name} is missing", "copy the whole dataset folder")
        files.append(root / name)
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing", "copy the whole dataset folder") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", "save the dataset again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no object", "save the dataset again")
    return value


def _names(splits: object) -> str:
    return ", ".join(map(repr, splits)) if isinstance(splits, Iterable) else "none"


def _near(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"nor does {parent}"
    near = nearest(path.name, (p.name for p in parent.iterdir() if not p.name.startswith(".")))
    return near if near.startswith("did you mean") else "check the path"
