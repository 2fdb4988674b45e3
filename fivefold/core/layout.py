"""A Layout is data: how many ways each parallel axis splits the work.

`Layout` is parsed from `dp_shard=2,tp=2`, validated against a world size, and read by
training, serving and planning alike. "Axis" is a mesh axis; "dim" is a tensor dimension.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fivefold.core.errors import LayoutError, nearest

AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
# Outermost first: ranks that differ in the last axis alone are neighbours.
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Layout(BaseModel):
    """Ways each axis splits, and how.

    `zero` says what `dp_shard` x `cp` ranks divide among themselves (Rajbhandari et al. 2020):
    1 optimizer state, 2 also gradients, 3 also parameters. `dp_replicate > 1` together with
    `dp_shard > 1` is hybrid sharding (HSDP): shards inside a group, copies between groups.
    `ep` reuses the ranks of `dp_shard` x `cp` x `tp`: it divides their number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_replicate: int = Field(1, ge=1, description="copies of the model (DDP)")
    dp_shard: int = Field(1, ge=1, description="ranks that share one copy's state (ZeRO/FSDP)")
    tp: int = Field(1, ge=1, description="tensor parallel ways")
    pp: int = Field(1, ge=1, description="pipeline stages")
    cp: int = Field(1, ge=1, description="context parallel ways")
    ep: int = Field(1, ge=1, description="expert parallel ways")
    zero: Literal[1, 2, 3] = Field(3, description="what dp_shard divides: ZeRO stage")
    sequence_parallel: bool = Field(
        True, description="tp ranks also divide the sequence between blocks"
    )
    ulysses: int = Field(1, ge=1, description="ways inside cp that divide heads; the rest is KV")
    cp_kind: Literal["ring", "gather"] = Field("ring", description="how cp ranks share KV")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipe-v"] = (
        Field("1f1b", description="order of micro-batches in the pipeline")
    )
    virtual: int = Field(1, ge=1, description="interleaved: stages a pipeline rank holds")
    stage_layers: tuple[int, ...] | None = Field(
        None, description="layers of each pipeline stage, e.g. 7/8/8/7; none: by estimated cost"
    )
    order: tuple[str, ...] = Field(
        ORDER, description="axes from outermost to innermost (ranks next to each other)"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="keep optimizer state, or parameters too, in host memory"
    )

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _stage_layers(cls, value: Any) -> Any:
        if isinstance(value, str) and not all(part.isdigit() for part in value.split("/")):
            raise ValueError("stage_layers is numbers of layers with / between, e.g. 7/8/8/7")
        return tuple(map(int, value.split("/"))) if isinstance(value, str) else value

    @field_validator("order", mode="before")
    @classmethod
    def _order(cls, value: Any) -> Any:
        names = tuple(value.split("/")) if isinstance(value, str) else tuple(value)
        if sorted(names) != sorted(ORDER):
            raise ValueError(f"order must name each of {'/'.join(ORDER)} once")
        return names

    @property
    def world_size(self) -> int:
        """Ranks this layout needs. `ep` reuses data ranks, so it does not multiply."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that divide the training state among themselves: context ranks take part."""
        return self.dp_shard * self.cp

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
        if self.shards > 1:
            split.append(f"zero={self.zero}")
        told = [*split]
        for name in ("offload", "sequence_parallel", "ulysses", "cp_kind", "schedule", "virtual"):
            if getattr(self, name) != type(self).model_fields[name].default:
                told.append(f"{name}={getattr(self, name)}".lower())
        if self.stage_layers is not None:
            told.append(f"stage_layers={'/'.join(map(str, self.stage_layers))}")
        if self.order != ORDER:
            told.append(f"order={'/'.join(self.order)}")
        return ",".join(told) or "single"


def parse_assignments(text: str) -> dict[str, Any]:
    """`a=1,b=x` to a mapping whose keys are Layout's. Raises LayoutError for anything else."""
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, separator, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not separator or not value:
            raise LayoutError(f"layout part {part!r} is not AXIS=N", "write e.g. dp_shard=2,tp=2")
        if name not in Layout.model_fields:
            raise LayoutError(f"unknown layout axis {name!r}", nearest(name, Layout.model_fields))
        values[name] = _value(name, value)
    return values


def _value(name: str, value: str) -> Any:
    """`value` as the field's type, as far as a word alone tells; pydantic checks the rest."""
    annotation = Layout.model_fields[name].annotation
    if annotation is bool:
        if value.lower() not in ("true", "false"):
            raise LayoutError(f"layout {name}={value!r} is neither true nor false", "use one")
        return value.lower() == "true"
    choices = get_args(annotation)
    if choices and isinstance(choices[0], str) and value not in choices:
        raise LayoutError(f"layout {name}={value!r} is not known", nearest(value, choices))
    if annotation is int or (choices and isinstance(choices[0], int)):
        if not value.isdigit() or int(value) < 1:
            raise LayoutError(
                f"layout {name}={value!r} is not a positive whole number", "use 1, 2, …"
            )
        return int(value)
    return value
