"""What context parallelism asks of a layout and a model, checked before anything starts."""

from __future__ import annotations

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig


def check(layout: Layout, config: ModelConfig, sequence_length: int) -> None:
    """Raise LayoutError unless `layout` can divide rows of `sequence_length` and `config`'s heads.

    Rows that do not divide are padded (`ContextSplit.of`), which is not an error; nor are key
    heads that do not divide over `ulysses`, which are sent more than once. Heads that do not
    divide by `tp` alone are for the tensor axis to refuse.
    """
    if layout.cp % layout.ulysses:
        raise LayoutError(
            f"layout ulysses={layout.ulysses} does not divide cp={layout.cp}",
            f"use one of ulysses={', '.join(map(str, _divisors(layout.cp)))}",
        )
    heads, rest = divmod(config.num_heads, layout.tp)
    if rest == 0 and heads % layout.ulysses:
        shared = f"tp={layout.tp} x " if layout.tp > 1 else ""
        most = max(ways for ways in _divisors(layout.cp) if heads % ways == 0)
        raise LayoutError(
            f"{config.num_heads} attention heads do not divide by {shared}ulysses={layout.ulysses}",
            f"use ulysses={most}, and a ring for the rest of cp",
        )
    chunks = 2 * layout.cp
    if sequence_length < chunks:
        raise LayoutError(
            f"cp={layout.cp} cuts a sequence into {chunks} chunks, but "
            f"data.sequence_length={sequence_length}",
            f"use cp={max(1, sequence_length // 2)} or less, or longer sequences",
        )


def _divisors(number: int) -> list[int]:
    return [ways for ways in range(1, number + 1) if number % ways == 0]
