"""Every layout of a number of ranks that a model can be run on, with options drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fivefold.axes.check import SPLIT_BACKWARD, check_model
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig
from tests.dist.cases import GLOBAL_BATCH, SEQUENCE

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


def splits(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Ways of writing `ranks` as a product of `axes` numbers."""
    if axes == 1:
        yield (ranks,)
        return
    for ways in range(1, ranks + 1):
        if ranks % ways == 0:
            for rest in splits(ranks // ways, axes - 1):
                yield (ways, *rest)


def layouts(ranks: int, config: ModelConfig, seed: int = 0) -> list[str]:
    """One layout for each split of `ranks` and each `ep`, options drawn; only those that fit."""
    found = []
    for split in splits(ranks, len(AXES)):
        for ep in (1, 2, 4, 8):
            axes = dict(zip(AXES, split, strict=True)) | {"ep": ep}
            drawn = random.Random(f"{seed} {axes} {config.family} {config.tie_embeddings}")
            layout = _with_options(axes, drawn)
            if layout is not None and _fits(layout, config):
                found.append(_text(layout))
    return found


def _with_options(axes: dict[str, int], drawn: random.Random) -> Layout | None:
    options: dict[str, object] = {"zero": drawn.choice((1, 2, 3))}
    sharded = axes["dp_shard"] * axes["cp"] > 1
    if axes["pp"] > 1:
        options["schedule"] = drawn.choice(
            ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipe-v")
        )
        if options["schedule"] == "interleaved":
            options["virtual"] = 2
        if sharded and options["zero"] != 1:
            split = options["schedule"] in SPLIT_BACKWARD
            options["zero"] = 1 if split or options["zero"] == 2 else 3
    if axes["cp"] > 1:
        options["ulysses"] = drawn.choice([u for u in (1, 2, 4, 8) if axes["cp"] % u == 0])
        options["cp_kind"] = drawn.choice(("ring", "gather"))
    if axes["tp"] > 1:
        options["sequence_parallel"] = drawn.random() < 0.75
    if drawn.random() < 0.2:
        options["order"] = drawn.sample(["pp", "dp_replicate", "dp_shard", "cp", "tp"], 5)
    return Layout(**axes, **options)


def _fits(layout: Layout, config: ModelConfig) -> bool:
    try:
        check_model(layout, config, SEQUENCE)
    except LayoutError:
        return False
    microbatches = GLOBAL_BATCH // layout.dp
    stages = layout.pp * (2 if layout.schedule in ("interleaved", "zbv", "dualpipe-v") else 1)
    enough = microbatches >= {"dualpipe": 2, "dualpipe-v": 2}.get(layout.schedule, 1) * layout.pp
    even = layout.pp % 2 == 0 or layout.schedule != "dualpipe"
    return layout.pp == 1 or (enough and even and stages <= config.num_layers)


def _text(layout: Layout) -> str:
    fields = layout.model_dump(exclude_defaults=True)
    words = {"order": "/".join(layout.order)}
    return ",".join(f"{k}={words.get(k, str(v).lower())}" for k, v in fields.items())
