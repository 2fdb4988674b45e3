"""What is asked: lengths, what prompts share, and when a trace says so, the time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.traces import MOONCAKE_BLOCK, TraceRow

Part = tuple[str, int, int]
"""(kind, id, tokens): parts of equal kind and id begin with the same text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request before its prompt is made: either `parts` or a `text` as it is."""

    output_tokens: int
    parts: tuple[Part, ...] = ()
    text: str | None = None
    at: float | None = None

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt; None for a given text."""
        return sum(count for _, _, count in self.parts) if self.text is None else None


@dataclass(frozen=True, slots=True)
class Fit:
    """How requests of a trace are made to fit a model: scaled, then cut."""

    scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise LoadError(f"a length scale of {self.scale}", "give a number above 0")

    def input(self, tokens: int) -> int:
        """Prompt tokens, at least one."""
        return _within(tokens * self.scale, self.max_input)

    def output(self, tokens: int) -> int:
        """Tokens to produce, at least one."""
        return _within(tokens * self.scale, self.max_output)

    def cuts(self, row: TraceRow) -> bool:
        """Whether a row is shortened by a limit."""
        whole = Fit(self.scale)
        return (self.input(row.input_tokens), self.output(row.output_tokens)) != (
            whole.input(row.input_tokens), whole.output(row.output_tokens)
        )  # fmt: skip


def made_up(
    count: int,
    input_tokens: int,
    output_tokens: int,
    *,
    spread: float = 0.0,
    shared_prefix: int = 0,
    prefixes: int = 1,
    seed: int = 0,
) -> list[Asked]:
    """Lengths drawn evenly within `spread` (a share) of those given; 0: always those.

    Of each prompt the first `shared_prefix` tokens are one of `prefixes` texts, drawn evenly.
    """
    if shared_prefix >= input_tokens:
        raise LoadError(
            f"a shared prefix of {shared_prefix} in prompts of {input_tokens} tokens",
            "leave each prompt at least one token of its own",
        )
    draw = np.random.default_rng([seed, 1])
    own = _lengths(draw, count, input_tokens - shared_prefix, spread)
    output = _lengths(draw, count, output_tokens, spread)
    which = draw.integers(0, prefixes, count).tolist()
    found = []
    for index in range(count):
        shared: tuple[Part, ...] = ()
        if shared_prefix:
            shared = (("prefix", which[index], shared_prefix),)
        found.append(Asked(output[index], (*shared, ("own", index, own[index]))))
    return found


def from_trace(rows: Sequence[TraceRow], fit: Fit, speed: float = 1.0) -> list[Asked]:
    """A trace's requests. Those that share blocks in the trace share their beginnings here."""
    if not (math.isfinite(speed) and speed > 0):
        raise LoadError(f"a speed of {speed}", "give a number above 0")
    block = math.ceil(MOONCAKE_BLOCK * fit.scale)
    found = []
    for index, row in enumerate(rows):
        tokens = fit.input(row.input_tokens)
        parts = _blocks(row.blocks, block, tokens) if row.blocks else (("own", index, tokens),)
        found.append(Asked(fit.output(row.output_tokens), parts, at=row.at / speed))
    return found


def from_file(path: Path, count: int, output_tokens: int) -> list[Asked]:
    """Texts of a file, again from its beginning where there are fewer than `count`.

    A `.jsonl` file has objects with `prompt` and, if they differ, `output_tokens`; any other
    has a prompt a line. Raises LoadError naming the line that is wrong.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}", "check --prompts") from None
    except UnicodeDecodeError:
        raise LoadError(f"{path} is no UTF-8 text", "convert it") from None
    read = _from_json if path.suffix == ".jsonl" else _from_line
    texts = [
        read(line, f"{path} line {number}", output_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not texts:
        raise LoadError(f"{path} holds no prompt", "write one a line")
    return [texts[index % len(texts)] for index in range(count)]


def _from_line(line: str, where: str, output_tokens: int) -> Asked:
    return Asked(output_tokens, text=line)


def _from_json(line: str, where: str, output_tokens: int) -> Asked:
    try:
        row = json.loads(line)
    except ValueError:
        raise LoadError(f"{where} is not JSON", "mend or delete that line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise LoadError(f"{where} has no text under `prompt`", 'write {"prompt": "..."}')
    output = row.get("output_tokens", output_tokens)
    if type(output) is not int or output < 1:
        raise LoadError(f"{where} has output_tokens {output!r}", "give a whole number above 0")
    return Asked(output, text=prompt)


def _blocks(ids: Sequence[int], size: int, tokens: int) -> tuple[Part, ...]:
    """As many blocks as make up `tokens`, the last one cut."""
    whole, rest = divmod(tokens, size)
    parts = [("block", id, size) for id in ids[:whole]]
    if rest:
        parts.append(("block", ids[whole], rest))
    return tuple(parts)


def _lengths(draw: np.random.Generator, count: int, middle: int, spread: float) -> list[int]:
    if not 0 <= spread < 1:
        raise LoadError(f"a spread of {spread}", "give a share from 0 up to, not including, 1")
    low, high = math.ceil(middle * (1 - spread)), math.floor(middle * (1 + spread))
    return draw.integers(max(1, low), max(1, high) + 1, count).tolist()


def _within(tokens: float, limit: int | None) -> int:
    wanted = max(1, round(tokens))
    return wanted if limit is None else min(wanted, limit)
