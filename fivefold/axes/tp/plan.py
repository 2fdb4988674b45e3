"""How each parameter of a decoder lies on the tensor axis: data beside the model.

Names are the decoder's, without the number of the layer. What is not named here is held whole by
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.core.errors import LayoutError
from fivefold.model.config import ModelConfig

Unit = Literal["row", "head", "kv_head"]


@dataclass(frozen=True)
class Split:
    """Divided along `dim`, in whole units."""

    dim: int
    unit: Unit = "row"


# Column parallel: each rank computes some of the outputs. Row parallel: it has some of the inputs.
PLAN: dict[str, Split] = {
    "embedding.weight": Split(0),
    "head.weight": Split(0),
    "attention.query.weight": Split(0, "head"),
    "attention.query.bias": Split(0, "head"),
    "attention.query_up.weight": Split(0, "head"),
    "attention.key.weight": Split(0, "kv_head"),
    "attention.key.bias": Split(0, "kv_head"),
    "attention.value.weight": Split(0, "kv_head"),
    "attention.value.bias": Split(0, "kv_head"),
    "attention.key_value_up.weight": Split(0, "head"),
    "attention.output.weight": Split(1, "head"),
    **{
        f"feed_forward.{shared}{leaf}": split
        for shared in ("", "shared.")
        for leaf, split in {
            "gate.weight": Split(0),
            "gate.bias": Split(0),
            "up.weight": Split(0),
            "up.bias": Split(0),
            "down.weight": Split(1),
        }.items()
    },
}
# Added once, to the sum: partial sums come without it.
ADDED_AFTER = ("attention.output.bias", "feed_forward.down.bias", "feed_forward.shared.down.bias")
# Modules that compute with divided parameters: hidden states are brought together before them, and
# their partial sums are added after them.
DIVIDED_MODULES = ("attention", "feed_forward", "feed_forward.shared")


def rule(name: str) -> Split | None:
    """The plan's entry for a parameter of the decoder; None where each rank holds it whole."""
    parts = name.split(".")
    return PLAN.get(".".join(parts[2:] if parts[0] == "layers" else parts))


def share(size: int, split: Split, config: ModelConfig, rank: int, ranks: int) -> tuple[int, int]:
    """(start, size) of `rank`'s part of a dim of `size`, in whole units."""
    units = {"row": size, "head": config.num_heads, "kv_head": config.num_kv_heads}[split.unit]
    each = size // units
    if split.unit == "kv_head" and ranks > units:
        return rank * units // ranks * each, each  # one head, shared with ranks // units - 1 others
    most = -(-units // ranks)  # as torch.chunk divides
    start = min(rank * most, units)
    return start * each, min(most, units - start) * each


def check_heads(config: ModelConfig, ranks: int) -> None:
    """Raise LayoutError where heads, columns or vocabulary cannot be divided over `ranks`."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % ranks:
        raise LayoutError(
            f"layout tp={ranks} does not divide the model's {heads} attention heads",
            f"use tp={_divisor(heads, ranks)}",
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise LayoutError(
            f"layout tp={ranks} and the model's {kv_heads} key/value heads: "
            "neither divides the other",
            f"use tp={_divisor(kv_heads, ranks)}",
        )
    shared = 0 if config.moe is None else config.moe.shared_size
    for what, size in (
        ("columns", config.intermediate_size),
        ("columns of shared experts", shared),
        ("tokens", config.vocab_size),
    ):
        if size and -(-size // ranks) * (ranks - 1) >= size:  # as torch.chunk divides
            raise LayoutError(
                f"layout tp={ranks} leaves ranks without any of the model's {size} {what}",
                "use a smaller tp",
            )


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return max(n for n in range(1, limit + 1) if number % n == 0)
