"""The flags of another system that mean what a plan says, and what has no equivalent there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Flags:
    """`words`: flags and their values; `notes`: where the other system differs."""

    system: str
    start: str
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """One flag a line, for a shell."""
        lines, at = [self.start], 0
        while at < len(self.words):
            end = at + 1
            while end < len(self.words) and not self.words[end].startswith("--"):
                end += 1
            lines.append(" ".join(shlex.quote(word) for word in self.words[at:end]))
            at = end
        return " \\\n  ".join(lines)


class Writer:
    """Collects flags and notes in order."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.notes: list[str] = []

    def add(self, flag: str, *values: object) -> None:
        """`--flag value …`."""
        self.words += [f"--{flag}", *(_text(value) for value in values)]

    def weights(self, form: str, made: Mapping[str, str]) -> None:
        """The format of weights, as vLLM and SGLang say it; `made`: those they make on loading."""
        if form in made:
            self.add("quantization", made[form])
        elif form in DTYPES:
            self.add("dtype", DTYPES[form])
        else:
            self.note(f"give it a model whose weights are stored in {form}")

    def note(self, text: str) -> None:
        """What a reader must know."""
        self.notes.append(text)

    def done(self, system: str, start: str) -> Flags:
        """All of it."""
        return Flags(system, start, tuple(self.words), tuple(self.notes))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) or value >= 1e15 else str(int(value))
    return str(value)
