"""What prompts are made of: token ids, or words in numbers that come to the wanted tokens.

The same seed, kind and id give the same beginning whatever the length: that is what prompts with
a part in common share.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fivefold.engines.serve.load.common_words import COMMON_WORDS
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.workload import Part

Prompt = str | list[int]
LEFT_OUT = 32
"""The first ids of a vocabulary, where special tokens mostly are, if it has four times as many."""


class Material(Protocol):
    """Makes prompts out of parts."""

    def prompt(self, parts: Sequence[Part]) -> Prompt:
        """The prompt, anew but equal at each call."""
        ...


@dataclass(frozen=True)
class TokenIds:
    """Prompts as lists of random ids below `vocabulary`: exactly as long as wanted."""

    vocabulary: int
    seed: int

    def prompt(self, parts: Sequence[Part]) -> list[int]:
        """Ids of all parts."""
        low = LEFT_OUT if self.vocabulary >= 4 * LEFT_OUT else 0
        found: list[int] = []
        for kind, id, count in parts:
            draw = _generator(self.seed, kind, id)
            found += draw.integers(low, self.vocabulary, count).tolist()
        return found


Draw = Callable[[np.random.Generator, int], list[str]]


@dataclass(frozen=True)
class Words:
    """Prompts as text: `per_token` words for a token, after `overhead` tokens of a chat template."""

    seed: int
    draw: Draw
    per_token: float = 1.0
    overhead: int = 0

    def prompt(self, parts: Sequence[Part]) -> str:
        """Words of all parts; the last one, a request's own, makes room for the template."""
        found: list[str] = []
        for place, (kind, id, count) in enumerate(parts):
            room = count - (self.overhead if place == len(parts) - 1 else 0)
            words = max(1, round(room * self.per_token))
            found += self.draw(_generator(self.seed, kind, id), words)
        return " ".join(found)

    def calibrated(self, short: tuple[int, int], long: tuple[int, int]) -> Words:
        """With what two prompts of (words, tokens) tell about words and tokens."""
        tokens_a_word = (long[1] - short[1]) / (long[0] - short[0])
        if tokens_a_word <= 0:
            raise LoadError(
                f"the server counts {short[1]} tokens for {short[0]} words, but {long[1]} for"
                f" {long[0]}",
                "check its usage.prompt_tokens",
            )
        overhead = max(0, round(short[1] - short[0] * tokens_a_word))
        return replace(self, per_token=1 / tokens_a_word, overhead=overhead)


def common_words(draw: np.random.Generator, count: int) -> list[str]:
    """Short English words in random order: most tokenizers have each as one token."""
    return [COMMON_WORDS[i] for i in draw.integers(0, len(COMMON_WORDS), count).tolist()]


def words_of(path: Path) -> Draw:
    """Runs of a text file's words, each from a random place on, round its end.

    Raises LoadError when it cannot be read or holds no word.
    """
    try:
        words = path.read_text("utf-8").split()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}", "check --text") from None
    except UnicodeDecodeError:
        raise LoadError(f"{path} is no UTF-8 text", "convert it") from None
    if not words:
        raise LoadError(f"{path} holds no word", "give another --text")

    def run(draw: np.random.Generator, count: int) -> list[str]:
        start = int(draw.integers(len(words)))
        return [words[(start + place) % len(words)] for place in range(count)]

    return run


def _generator(seed: int, kind: str, id: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(kind.encode()), id])
