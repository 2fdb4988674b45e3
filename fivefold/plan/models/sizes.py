"""A shape from a size alone (`13B`), or from its numbers (`layers=32,hidden=4096,heads=32`)."""

from __future__ import annotations

import math
import re

from fivefold.core.errors import PlanError, nearest
from fivefold.model.config import ModelConfig, MoEConfig, RopeConfig
from fivefold.plan.shape import ModelShape

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mMbBtT])")
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
# Sizes that are called by the name of a model that everyone knows.
KNOWN = {
    "7b": "llama-2-7b", "8b": "llama-3.1-8b", "13b": "llama-2-13b", "33b": "llama-33b",
    "65b": "llama-65b", "70b": "llama-2-70b", "405b": "llama-3.1-405b",
}  # fmt: skip
VOCABULARY = 32_000
HEAD = 128
ASPECT = 128  # hidden over layers of Llama from 7B to 33B, and of 405B
POSITIONS = 131_072
NUMBERS = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "kv": "num_kv_heads",
    "intermediate": "intermediate_size", "vocabulary": "vocab_size", "head": "head_dim",
    "experts": "experts", "top_k": "top_k", "expert": "expert_size", "shared": "shared_size",
    "tied": "tied", "positions": "positions",
}  # fmt: skip


def is_size(text: str) -> bool:
    """Whether `text` is a number of parameters, such as 13B."""
    return SIZE.fullmatch(text.strip()) is not None


def from_size(text: str) -> ModelShape:
    """A dense Llama of about so many parameters, of the usual proportions.

    Raises PlanError for a size that no such model has.
    """
    match = SIZE.fullmatch(text.strip())
    assert match is not None
    wanted = float(match[1]) * UNITS[match[2].lower()]
    if not 1e6 <= wanted <= 1e14:
        raise PlanError(f"no model of {text} parameters can be planned", "use 1M to 100T")
    layers, hidden = min(_near(wanted), key=lambda pair: _unlikeness(wanted, *pair))
    head = HEAD if hidden >= 2048 else HEAD // 2
    return ModelShape(
        name=text.strip().upper(),
        config=_llama(layers, hidden, hidden // head, hidden // head, _inner(hidden), head),
        source=f"Llama of {layers} layers and {hidden} hidden, which has about {text} parameters",
    )


def from_numbers(text: str) -> ModelShape:
    """`layers=32,hidden=4096,heads=32` and, if they differ from Llama's: kv, intermediate,
    vocabulary, head, experts, top_k, expert, shared (inner widths), tied, positions.

    Raises PlanError naming the part that is unknown, missing or no number.
    """
    given: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name not in NUMBERS:
            raise PlanError(f"a model has no number {name!r}", nearest(name, NUMBERS))
        if not value.strip().isdigit() or (int(value) < 1 and name != "tied"):
            raise PlanError(f"{part!r} is no positive whole number", f"write e.g. {name}=32")
        given[name] = int(value)
    for name in ("layers", "hidden", "heads"):
        if name not in given:
            raise PlanError(f"the model {text!r} has no {name}", f"add {name}=…")
    hidden, heads = given["hidden"], given["heads"]
    if "head" not in given and hidden % heads:
        raise PlanError(f"hidden={hidden} is no multiple of heads={heads}", "add head=…")
    kv = given.get("kv", heads)
    if heads % kv:
        raise PlanError(f"heads={heads} is no multiple of kv={kv}", "mend one of the two")
    return ModelShape(
        name=text,
        config=_llama(
            given["layers"], hidden, heads, kv, given.get("intermediate", _inner(hidden)),
            given.get("head", hidden // heads), given.get("vocabulary", VOCABULARY),
            bool(given.get("tied", 0)), given.get("positions", POSITIONS), _experts(given),
        ),
        source="given by its numbers",
    )  # fmt: skip


def _experts(given: dict[str, int]) -> MoEConfig | None:
    if "experts" not in given:
        for name in ("top_k", "expert", "shared"):
            if name in given:
                raise PlanError(f"{name}={given[name]} is of a model with experts", "add experts=…")
        return None
    top_k = given.get("top_k", 2)
    if top_k > given["experts"]:
        raise PlanError(
            f"top_k={top_k} is more than experts={given['experts']}", "mend one of the two"
        )
    return MoEConfig(
        experts=given["experts"],
        top_k=top_k,
        expert_size=given.get("expert", given.get("intermediate", _inner(given["hidden"]))),
        sparse=(True,) * given["layers"],
        shared_size=given.get("shared", 0),
        normalise=True,
    )


def _llama(
    layers: int, hidden: int, heads: int, kv: int, inner: int, head: int,
    vocabulary: int = VOCABULARY, tied: bool = False, positions: int = POSITIONS,
    moe: MoEConfig | None = None,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        family="llama" if moe is None else "mixtral",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner if moe is None else moe.expert_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head,
        max_positions=positions,
        windows=(None,) * layers,
        ropes=(RopeConfig(theta=500_000.0),) * layers,
        tie_embeddings=tied,
        moe=moe,
    )


def _inner(hidden: int) -> int:
    """Llama's feed-forward: 8/3 of the width, up to a multiple of 256."""
    return -(-8 * hidden // 3 // 256) * 256


def _count(layers: int, hidden: int) -> int:
    return layers * (4 * hidden**2 + 3 * hidden * _inner(hidden)) + 2 * VOCABULARY * hidden


def _near(wanted: float) -> list[tuple[int, int]]:
    """(layers, hidden) that come as near to `wanted` as a number of layers allows.

    Widths are such that their heads divide over 8 ranks, but for the smallest.
    """
    most = 2 * int((wanted / 12 * ASPECT**2) ** (1 / 3)) + 1024
    widths = [*range(128, 2048, 128), *range(2048, 4096, 512), *range(4096, max(most, 4097), 1024)]
    found = []
    for hidden in widths:
        outside = 2 * VOCABULARY * hidden
        layers = round((wanted - outside) / (_count(1, hidden) - outside))
        found += [(n, hidden) for n in (layers - 1, layers, layers + 1) if n >= 1]
    return found


def _unlikeness(wanted: float, layers: int, hidden: int) -> float:
    """How far from the wanted size and from the usual proportions, and how awkward to split."""
    size = abs(math.log(_count(layers, hidden) / wanted))
    proportion = abs(math.log(hidden / (ASPECT * layers)))
    awkward = (
        0.0 if layers % 8 == 0 else 0.01 if layers % 4 == 0 else 0.03 if layers % 2 == 0 else 0.06
    )
    return size + 0.3 * proportion + awkward
