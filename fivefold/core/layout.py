"""A Layout is data: how many ways each parallel axis splits the work.

`Layout` is parsed from `dp_shard=2,tp=2`, validated against a world size, and read by
training, serving and planning alike. "Axis" is a mesh axis; "dim" is a tensor dimension.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fivefold.core.errors import LayoutError, nearest

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


class Layout(BaseModel):
    """Ways each axis splits, and what the data axis shards.

    `zero` says what `dp_shard` ranks divide among themselves (Rajbhandari et al. 2020):
    1 optimizer state, 2 also gradients, 3 also parameters. `dp_replicate > 1` together with
    `dp_shard > 1` is hybrid sharding (HSDP): shards inside a group, copies between groups.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_replicate: int = Field(1, ge=1, description="copies of the model (DDP)")
    dp_shard: int = Field(1, ge=1, description="ranks that share one copy's state (ZeRO/FSDP)")
    tp: int = Field(1, ge=1, description="tensor parallel ways")
    pp: int = Field(1, ge=1, description="pipeline stages")
    cp: int = Field(1, ge=1, description="context parallel ways")
    ep: int = Field(1, ge=1, description="expert parallel ways")
    zero: Literal[1, 2, 3] = Field(3, description="what dp_shard divides: ZeRO stage")
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="keep optimizer state, or parameters too, in host memory"
    )

    @property
    def world_size(self) -> int:
        """Ranks this layout needs. `ep` reuses data ranks, so it does not multiply."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `dp_shard=2,tp=2`. Raises LayoutError naming the part that is wrong."""
        return cls(**parse_assignments(text))

    def check_world(self, world_size: int) -> None:
        """Raise LayoutError unless the axes multiply to `world_size`."""
        if self.world_size != world_size:
            product = " x ".join(f"{a}={getattr(self, a)}" for a in AXES if getattr(self, a) > 1)
            raise LayoutError(
                f"layout {product or 'of one rank'} needs {self.world_size} ranks, "
                f"but {world_size} were started",
                f"start it with --nproc {self.world_size}, or change the layout",
            )

    def __str__(self) -> str:
        split = [f"{a}={getattr(self, a)}" for a in AXES if getattr(self, a) > 1]
        if self.dp_shard > 1:
            split.append(f"zero={self.zero}")
        if self.offload != "none":
            split.append(f"offload={self.offload}")
        return ",".join(split) or "single"


def parse_assignments(text: str) -> dict[str, int | str]:
    """`a=1,b=x` to a mapping whose keys are Layout's. Raises LayoutError for anything else."""
    known = set(Layout.model_fields)
    values: dict[str, int | str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, separator, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not separator or not value:
            raise LayoutError(f"layout part {part!r} is not AXIS=N", "write e.g. dp_shard=2,tp=2")
        if name not in known:
            raise LayoutError(f"unknown layout axis {name!r}", nearest(name, known))
        if name == "offload":
            values[name] = value
            continue
        if not value.isdigit() or int(value) < 1:
            raise LayoutError(
                f"layout {name}={value!r} is not a positive whole number", "use 1, 2, …"
            )
        values[name] = int(value)
    return values
