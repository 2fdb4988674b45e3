"""A cluster described in a YAML file: a catalogue device and what differs, or all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fivefold.core.errors import PlanError, nearest, one_line
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.link import Link
from fivefold.plan.hardware.quantity import Quantity, quantity
from fivefold.plan.hardware.servers import FAILURES, SERVERS, Server


class Part(BaseModel):
    """A section of the file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkPart(Part):
    """One link: bytes per second in one direction, seconds a message and before the first."""

    name: str | None = None
    bandwidth: Quantity | None = Field(None, gt=0)
    latency: Quantity | None = Field(None, ge=0)
    start: Quantity | None = Field(None, ge=0)
    efficiency: float | None = Field(None, gt=0, le=1)
    multicast: bool | None = None


class DevicePart(Part):
    """`like` a catalogue device or a measured `profile`, with what differs; or everything.

    A name alone is one to be like.
    """

    like: str | None = None
    profile: Path | None = None
    name: str | None = None
    peak: dict[str, Quantity] | None = None
    memory: Quantity | None = Field(None, gt=0)
    bandwidth: Quantity | None = Field(None, gt=0)
    watts: float | None = Field(None, ge=0)
    price: float | None = Field(None, ge=0)
    spot_price: float | None = Field(None, ge=0)
    efficiency: dict[str, Any] | None = None
    source: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"like": value} if isinstance(value, str) else value


class ClusterPart(Part):
    """The whole file."""

    name: str | None = None
    device: DevicePart
    nodes: int = Field(ge=1)
    per_node: int = Field(ge=1)
    domain: int | None = Field(None, ge=1)
    inside: LinkPart | None = None
    between: LinkPart | None = None
    host: LinkPart | None = None
    failures: float | None = Field(None, ge=0)
    restart: Quantity | None = Field(None, ge=0)


def read_cluster(path: Path) -> Cluster:
    """The cluster in `path`: YAML, or the JSON of a profile of `fivefold bench device`.

    Raises PlanError when the file cannot be read, or naming the field that is missing or wrong.
    """
    found = _load(path)
    if "gemm" in found:
        from fivefold.plan.hardware.measured import cluster_of
        from fivefold.plan.hardware.profile import parse_profile

        return cluster_of(parse_profile(found, str(path)))
    try:
        part = ClusterPart.model_validate(found)
    except ValidationError as error:
        raise PlanError(*_explain(path, error)) from error
    return _cluster(path, part)


def _load(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(
            f"cannot read the cluster file {path}: {error.strerror}", "give a file that exists"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is no YAML: {one_line(error)}", "mend that line") from error
    if not isinstance(found, dict):
        raise PlanError(f"{path} holds no cluster", "give device, nodes and per_node")
    return found


def _explain(path: Path, error: ValidationError) -> tuple[str, str]:
    """One line of the first thing that is wrong: the field by its dotted name."""
    # What is not known first: it is often a misspelling of what is then missing.
    wrong = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    field = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "missing":
        return f"{path} has no `{field}`", f"add {field}: to the cluster file"
    if wrong["type"] == "extra_forbidden":
        leaf = str(wrong["loc"][-1])
        models: dict[bool, Any] = {True: ClusterPart, False: DevicePart}
        links = wrong["loc"][0] in ("inside", "between", "host")
        model = LinkPart if links else models[len(wrong["loc"]) == 1]
        return f"{path} has an unknown field `{field}`", nearest(leaf, model.model_fields)
    if wrong["type"] == "model_type":
        return f"`{field}` of {path} is {wrong['input']!r}", "give a section with keys and values"
    told = one_line(wrong["msg"]).removeprefix("Value error, ")
    return f"`{field}` of {path} is {wrong['input']!r}", told[0].lower() + told[1:]


def _cluster(path: Path, part: ClusterPart) -> Cluster:
    found, server = _device(path, part.device)
    if part.domain is not None and part.domain > part.nodes * part.per_node:
        raise PlanError(
            f"`domain` of {path} is {part.domain}, more than its {part.nodes * part.per_node} devices",
            "use at most nodes times per_node",
        )
    if part.domain is not None and part.domain % part.per_node and part.per_node % part.domain:
        raise PlanError(
            f"`domain` of {path} is {part.domain}, which nodes of {part.per_node} do not divide into",
            f"use a divisor or a multiple of per_node: {part.per_node}",
        )
    rack = server is not None and server.domain > server.per_node
    usual = server.domain if server is not None and rack else part.per_node
    domain = part.domain or min(usual, part.nodes * part.per_node)
    return Cluster(
        name=part.name or path.stem,
        device=found,
        nodes=part.nodes,
        per_node=part.per_node,
        domain=domain,
        inside=_link(path, "inside", part.inside, None if server is None else server.inside),
        between=_link(path, "between", part.between, None if server is None else server.between),
        host=_link(path, "host", part.host, None if server is None else server.host),
        failures=FAILURES if part.failures is None else part.failures,
        restart=600.0 if part.restart is None else part.restart,
    )


def _device(path: Path, part: DevicePart) -> tuple[Device, Server | None]:
    from dataclasses import replace

    base, server = _base(path, part)
    given = part.model_dump(exclude={"like", "profile", "efficiency", "peak"}, exclude_none=True)
    efficiency = part.efficiency or {}
    if base is None:
        for field in ("name", "peak", "memory", "bandwidth", "efficiency"):
            if getattr(part, field) is None:
                raise PlanError(
                    f"{path} has no `device.{field}`",
                    "add it, or name a catalogue device with `like`",
                )
        return Device(
            **given, peak=part.peak or {}, efficiency=_efficiency(path, None, efficiency)
        ), None
    given["peak"] = {**base.peak, **(part.peak or {})}
    given["efficiency"] = _efficiency(path, base, efficiency)
    if part.source is None:
        given["source"] = f"{base.source}; changed in {path.name}"
    return replace(base, **given), server


def _base(path: Path, part: DevicePart) -> tuple[Device | None, Server | None]:
    from fivefold.plan.hardware.catalogue import device
    from fivefold.plan.hardware.measured import device_of, this_machine
    from fivefold.plan.hardware.profile import read_profile

    if part.profile is not None:
        where = part.profile if part.profile.is_absolute() else path.parent / part.profile
        profile = read_profile(where)
        return device_of(profile), SERVERS.get(profile.catalogue or "")
    if part.like is None:
        return None, None
    if part.like.partition(":")[0] == "this":
        return this_machine(part.like, None, None).device, None
    found = device(part.like)
    return found, SERVERS[found.name.partition(":")[0]]


def _efficiency(path: Path, base: Device | None, given: dict[str, Any]) -> Any:
    from dataclasses import fields, replace

    from fivefold.plan.hardware.efficiency import Efficiency

    known = {field.name for field in fields(Efficiency)}
    for name in given:
        if name not in known:
            raise PlanError(
                f"{path} has an unknown field `device.efficiency.{name}`", nearest(name, known)
            )
    try:
        numbers = {
            k: quantity(v) if isinstance(v, str) and k != "source" else v for k, v in given.items()
        }
    except ValueError as error:
        raise PlanError(f"`device.efficiency` of {path}: {error}", "use plain numbers") from error
    given = {"source": str(path.name), **numbers} if given or base is None else given
    if base is not None:
        return replace(base.efficiency, **given)
    try:
        return Efficiency(**given)
    except TypeError as error:
        raise PlanError(
            f"`device.efficiency` of {path} is not whole: {one_line(error)}", "add what is missing"
        ) from error


def _link(path: Path, field: str, part: LinkPart | None, usual: Link | None) -> Link:
    given = {} if part is None else part.model_dump(exclude_none=True)
    for needed in ("bandwidth", "latency"):
        if usual is None and needed not in given:
            raise PlanError(
                f"{path} has no `{field}.{needed}`", f"add {field}: with bandwidth and latency"
            )
    if usual is None:
        return Link(**{"name": field, "source": path.name, **given})
    if not given:
        return usual
    from dataclasses import replace

    return replace(usual, **{"source": path.name, **given})
