"""What a peer must do. Its own packages are imported inside its methods alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Options:
    """`folder`: SmolLM2 as a Hugging Face folder; `gguf`: the file it was made from."""

    folder: Path
    gguf: Path
    dtype: str
    threads: int


class Peer(ABC):
    """An engine with SmolLM2-135M in it, on CPU threads."""

    name: ClassVar[str]
    module: ClassVar[str]
    """What importing tells whether it is installed."""
    packages: ClassVar[tuple[str, ...]] = ()
    """pip's arguments for its own venv; none: it runs in the venv of fivefold."""
    unwanted: ClassVar[tuple[str, ...]] = ()
    """What comes along and is taken out again."""
    build: ClassVar[dict[str, str]] = {}
    """Environment of that pip."""
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp32")
    text_only: ClassVar[bool] = False
    """Whether its server takes no token ids."""
    no_server: ClassVar[str] = ""
    """Why it has no OpenAI server that could be compared."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @staticmethod
    def environment(options: Options) -> dict[str, str]:
        """What its process must find in its environment."""
        return {"OMP_NUM_THREADS": str(options.threads)}

    @abstractmethod
    def load(self) -> None:
        """Read the weights."""

    @abstractmethod
    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        """Greedy, never stopping early: how many tokens each answer has."""

    @staticmethod
    def server(options: Options, python: str, port: int) -> list[str]:
        """The command of its OpenAI server; of those without one, `no_server` says why."""
        return []
