"""A run's folder: the configuration it was started with, and where its records lie."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from fivefold.core.config import RunConfig
from fivefold.core.errors import ConfigError
from fivefold.core.resolve import flatten
from fivefold.observe.json_lines import JsonLines

# What may change between one start and the next without making it another run: where it runs,
# how far, how often it saves and what it shows. Everything else decides the loss sequence.
FREE_KEYS = ("layout.", "checkpoint.", "observe.", "evaluate.", "train.steps", "train.micro_batch")
LOCK_SECONDS = 5.0
LOCK_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, as YAML."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints with the pointers `latest` and `best`."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """Starts, resumes, checkpoints and stops, one JSON object a line."""
        return self.path / "events.jsonl"

    def make(self) -> None:
        """Create the folder. Raises ConfigError when that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the run directory {self.path}: {error.strerror}",
                "choose another --run-dir",
            ) from None

    def claim(self, config: RunConfig) -> None:
        """Take the folder for `config`.

        Raises ConfigError when it holds a run with another configuration (naming the first key
        that differs), cannot be written, or may not be resumed.
        """
        try:
            if self.config.exists():
                self._compare(config)
            _write_atomically(self.config, yaml.safe_dump(_plain(config), sort_keys=False))
        except OSError as error:
            raise ConfigError(
                f"cannot write the run directory {self.path}: {error.strerror}",
                "choose another --run-dir",
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second run; the lock dies with the process, however it ends.

        Raises ConfigError when another run still holds it after a few seconds, the time that the
        ranks of a killed run take to go.
        """
        with (self.path / "lock").open("a") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process is running in {self.path}",
                        "wait for it, stop it, or choose another --run-dir",
                    )
                time.sleep(LOCK_POLL_SECONDS)
            yield

    def record(self, event: str, **details: Any) -> None:
        """Append one event with its wall-clock time (seconds since the epoch)."""
        with closing(JsonLines(self.events)) as file:
            file.append({"event": event, "time": time.time(), **details})

    def _compare(self, config: RunConfig) -> None:
        try:
            held = flatten(yaml.safe_load(self.config.read_text("utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError):
            raise ConfigError(
                f"{self.config} is not readable YAML", "choose another --run-dir"
            ) from None
        if not config.checkpoint.resume:
            raise ConfigError(
                f"{self.path} already holds a run and checkpoint.resume is false",
                "choose another --run-dir",
            )
        wanted = flatten(_plain(config))
        for key in sorted(held.keys() | wanted.keys()):
            if held.get(key) != wanted.get(key) and not key.startswith(FREE_KEYS):
                raise ConfigError(
                    f"{self.path} holds a run with {key}={held.get(key)!r}, "
                    f"but this one has {wanted.get(key)!r}",
                    "choose another --run-dir, or keep that value",
                )


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)
