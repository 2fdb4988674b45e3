"""Room for keys and values beside the weights, and how many sequences that holds."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import work
from fivefold.plan.shape import ModelShape

GIB = 2**30


@dataclass(frozen=True)
class Room:
    """Bytes of one device, and tokens of one engine."""

    memory: float
    weights: float
    step: float
    """What the largest step takes: hidden states, and logits of the rows that sample."""
    reserve: float
    cache: float
    token: float
    """Keys and values of one token on one device."""
    tokens: int
    """That the cache of an engine holds."""
    blocks: int

    def sequences(self, context: float) -> float:
        """Sequences of `context` tokens that an engine's cache holds."""
        return self.tokens / max(1.0, context)


def room(shape: ModelShape, strategy: ServingStrategy, cluster: Cluster) -> Room:
    """Raises PlanError, saying what is missing, when the weights leave no room for a block."""
    found, device = work(shape, strategy), cluster.device
    step = step_bytes(shape, strategy)
    reserve = strategy.system.reserve * device.memory
    usable = device.memory * strategy.memory_share
    cache = usable - found.weight_bytes - step - reserve
    block = strategy.block_size * found.token_bytes
    if cache < block:
        missing = (block - cache) / GIB
        raise PlanError(
            f"{shape.name} does not fit: {found.weight_bytes / GIB:.1f} GiB of weights and"
            f" {(step + reserve) / GIB:.1f} GiB for steps leave no room for keys and values in"
            f" {usable / GIB:.1f} GiB of each {device.name}, {missing:.1f} GiB are missing",
            smallest_fit(shape, strategy, cluster),
        )
    blocks = int(cache // block) * strategy.layout.dp_shard
    return Room(
        device.memory, found.weight_bytes, step, reserve, cache, found.token_bytes,
        blocks * strategy.block_size, blocks,
    )  # fmt: skip


def step_bytes(shape: ModelShape, strategy: ServingStrategy) -> float:
    """Most memory of a step on one device: eight hidden states and the widest product a token."""
    found = work(shape, strategy)
    widest = max(matrix.outputs for matrix in found.matrices)
    rows = min(strategy.budget, strategy.budget / strategy.layout.dp_shard + 1)
    if found.experts is not None:
        inner = found.experts.elements / found.experts.matrices / found.hidden
        share = found.experts.top_k * found.experts.ep / found.experts.ways
        widest = max(widest, 3 * inner * share + 2 * found.hidden * found.experts.top_k)
    sampled = strategy.max_sequences / strategy.layout.dp_shard
    return rows * (8 * found.hidden + 2 * widest) * 2 + sampled * found.head.outputs * 4


def smallest_fit(shape: ModelShape, strategy: ServingStrategy, cluster: Cluster) -> str:
    """The mend: fewest ranks, or else a narrower format, with which the model fits."""
    from dataclasses import replace

    for form in dict.fromkeys((strategy.weights, "fp8", "nvfp4")):
        for ways in (1, 2, 4, 8, 16, 32, 64):
            tp = min(ways * strategy.layout.tp, cluster.domain)
            pp = ways * strategy.layout.tp // tp
            layout = strategy.layout.model_copy(update={"tp": tp, "pp": strategy.layout.pp * pp})
            other = replace(strategy, layout=layout, weights=form)
            if other.engine_ranks <= cluster.devices and _fits(shape, other, cluster):
                same = form == strategy.weights
                return f"smallest change that fits: {layout}" + ("" if same else f" with {form}")
    return f"it fits in no layout of {cluster.name}: take larger devices or more of them"


def _fits(shape: ModelShape, strategy: ServingStrategy, cluster: Cluster) -> bool:
    try:
        found = work(shape, strategy)
    except PlanError:
        return False
    usable = cluster.device.memory * (strategy.memory_share - strategy.system.reserve)
    return usable - found.weight_bytes - step_bytes(shape, strategy) >= (
        strategy.block_size * found.token_bytes
    )
