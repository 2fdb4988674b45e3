"""How a model is served: what a search over serving layouts chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.serving.formats import KV_FORMATS, bytes_of
from fivefold.plan.serving.software import FIVEFOLD, ServingSoftware
from fivefold.plan.serving.speculation import Speculation


@dataclass(frozen=True)
class ServingStrategy:
    """One engine, copied `layout.dp_replicate` times behind a router.

    Of the layout, an engine has tp x pp x dp_shard ranks: `dp_shard` ways divide the requests over
    attention (attention DP), and experts lie on `ep` of these ranks, each cut by the rest.

    max_sequences: answers in the making at once, of an engine; token_budget: tokens a step.
    experts: format of experts' weights where it is not that of `weights`.
    """

    layout: Layout = field(default_factory=Layout)
    weights: str = "bf16"
    kv: str = "bf16"
    experts: str | None = None
    max_sequences: int = 256
    token_budget: int | None = None
    block_size: int = 32
    memory_share: float = 0.9
    speculation: Speculation | None = None
    system: ServingSoftware = FIVEFOLD

    def __post_init__(self) -> None:
        bytes_of(self.weights)
        if self.experts is not None:
            bytes_of(self.experts)
        if self.kv not in KV_FORMATS:
            raise PlanError(f"keys and values in {self.kv!r}", f"known: {', '.join(KV_FORMATS)}")
        if self.layout.cp != 1:
            raise PlanError(
                f"the layout has cp={self.layout.cp}", "engines split tp, pp, dp_shard and ep"
            )
        for name in ("max_sequences", "block_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}", "give a whole number above 0")
        if not 0 < self.memory_share <= 1:
            raise PlanError(f"memory_share={self.memory_share}", "give a share above 0, at most 1")
        if self.budget < 1:
            raise PlanError(f"token_budget={self.token_budget}", "give a whole number above 0")

    @property
    def budget(self) -> int:
        """Tokens a step computes at most."""
        return self.system.token_budget if self.token_budget is None else self.token_budget

    @property
    def engine_ranks(self) -> int:
        """Devices of one engine."""
        return self.layout.tp * self.layout.pp * self.layout.dp_shard

    @property
    def expert_ways(self) -> int:
        """Ranks of a pipeline stage, over which the experts of a layer lie."""
        return self.layout.tp * self.layout.dp_shard

    @property
    def expert_format(self) -> str:
        """Format of experts' weights."""
        return self.experts or self.weights


@dataclass(frozen=True)
class Split:
    """Prefill and decode on engines of their own; keys and values move between them."""

    prefill: ServingStrategy
    prefill_engines: int
    decode: ServingStrategy
    decode_engines: int

    def __post_init__(self) -> None:
        if min(self.prefill_engines, self.decode_engines) < 1:
            raise PlanError(
                f"{self.prefill_engines} engines read prompts, {self.decode_engines} write answers",
                "give at least one of each",
            )

    @property
    def devices(self) -> int:
        """All devices."""
        prefill = self.prefill.engine_ranks * self.prefill_engines
        return prefill + self.decode.engine_ranks * self.decode_engines
