"""What a machine was measured to do, as `fivefold bench device` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fivefold.core.environment import cache_folder
from fivefold.core.errors import PlanError, one_line

FORMAT = 1


class Record(BaseModel):
    """A measurement; unknown keys are those of a later version."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Gemm(Record):
    """[m,k] x [k,n] in `dtype`: seconds of one product.

    kind: `training` runs as forward does with gradients; `inference` over packed weights that lie in
    memory, not in a cache.
    """

    dtype: str
    m: int
    k: int
    n: int
    seconds: float
    kind: Literal["training", "inference"] = "training"

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.m * self.k * self.n

    @property
    def rate(self) -> float:
        """FLOP/s that it reached."""
        return self.flops / self.seconds


class AttentionTime(Record):
    """Causal attention of `batch` rows of `sequence` tokens.

    kind: `forward`; `training`, with backward; `decode`, one query a row over `sequence` cached keys.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    kind: Literal["forward", "training", "decode"]
    seconds: float

    @property
    def flops(self) -> float:
        """Operations on the keys that are seen; backward computes 2.5 times as many again."""
        pairs = self.sequence if self.kind == "decode" else self.sequence * (self.sequence + 1) / 2
        forward = 4.0 * self.batch * self.heads * self.head_dim * pairs
        return forward * (3.5 if self.kind == "training" else 1.0)

    @property
    def rate(self) -> float:
        """FLOP/s that it reached."""
        return self.flops / self.seconds


class Transfer(Record):
    """`bytes` read, copied, or sent between a device and its host, in `seconds`."""

    what: str
    bytes: int
    seconds: float


class CollectiveTime(Record):
    """One collective of `ranks` on this host; `bytes` of its whole tensor."""

    backend: str
    op: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
    ranks: int
    bytes: int
    seconds: float


class Profile(Record):
    """Everything measured of one machine at one time."""

    format: int = FORMAT
    name: str
    date: str  # ISO 8601, UTC
    versions: dict[str, str]
    device_type: Literal["cpu", "cuda"]
    devices: int = Field(ge=1)  # in this host
    threads: int = Field(ge=1)
    memory: float = Field(gt=0)  # bytes of a device
    catalogue: str | None = None  # the catalogue's name of the device, where it is there
    launch: float = Field(gt=0)  # seconds of the smallest operator
    gemm: tuple[Gemm, ...]
    attention: tuple[AttentionTime, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    corrections: dict[str, float] = {}  # measured over predicted, by piece of a step
    disturbed: bool = False  # other processes took time meanwhile
    note: str = ""


def profile_folder() -> Path:
    """Where the measured profiles of this machine are kept."""
    return cache_folder() / "hardware"


def own_profile(device_type: str) -> Path:
    """The file of this machine's `cpu` or `cuda` profile."""
    return profile_folder() / f"this-{device_type}.json"


def read_profile(path: Path) -> Profile:
    """The profile in `path`. Raises PlanError when it is not there, or is no profile."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(
            f"cannot read the hardware profile {path}: {error.strerror}",
            "measure one with `fivefold bench device`",
        ) from error
    except ValueError as error:
        raise PlanError(
            f"{path} is no hardware profile: {one_line(error)}",
            "measure one with `fivefold bench device`",
        ) from error
    return parse_profile(found, str(path))


def parse_profile(found: Any, where: str) -> Profile:
    """A profile from its JSON. Raises PlanError naming the field that is missing or wrong."""
    try:
        profile = Profile.model_validate(found)
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise PlanError(
            f"`{field}` of the hardware profile {where}: {one_line(wrong['msg']).lower()}",
            "measure it again with `fivefold bench device`",
        ) from error
    if profile.format != FORMAT or not profile.gemm:
        raise PlanError(
            f"the hardware profile {where} has format {profile.format} "
            f"and {len(profile.gemm)} matrix products",
            "measure it again with `fivefold bench device`",
        )
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile` as JSON. Raises PlanError when the file cannot be written."""
    text = json.dumps(profile.model_dump(mode="json"), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        raise PlanError(
            f"cannot write the hardware profile {path}: {error.strerror}",
            "choose another file with --out",
        ) from error
