"""A cluster from a few words: `8x8xH100`, `64xH100`, `2xNVL72`, a YAML file, or `this`."""

from __future__ import annotations

import re
from pathlib import Path

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.catalogue import close_names, device
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.device import Device
from fivefold.plan.hardware.servers import FAILURES, SERVERS, Server

WORDS = re.compile(r"(?:(\d+)\s*[xX×*]\s*)?(?:(\d+)\s*[xX×*]\s*)?([A-Za-z].*)")
RACKS = {"nvl72": "GB200", "gb200nvl72": "GB200", "gb300nvl72": "GB300"}
FILES = (".yaml", ".yml", ".json")
MEND = "write nodes x devices x name (8x8xH100), devices x name (64xH100), a YAML file, or `this`"


def cluster(text: str) -> Cluster:
    """Read a cluster. `this` is the machine that `fivefold bench device` measured last.

    Raises PlanError for what is none of these, an unknown device (with the close names), a number
    of devices that no server has, or a file with a field that is missing or wrong (naming it).
    """
    text = text.strip()
    if text.lower().endswith(FILES) or (text and Path(text).is_file()):
        from fivefold.plan.hardware.cluster_file import read_cluster

        return read_cluster(Path(text))
    match = WORDS.fullmatch(text)
    if match is None:
        raise PlanError(f"{text!r} is no cluster", MEND)
    first, second, name = match.groups()
    if name == "this" or name.startswith("this:"):
        from fivefold.plan.hardware.measured import this_machine

        return this_machine(name, *_counts(text, first, second))
    rack = RACKS.get(re.sub(r"[^a-z0-9]", "", name.lower()))
    if rack is not None and second is None:
        racks = _counts(text, first, None)[0] or 1
        return assemble(text, device(rack), 18 * racks, SERVERS[rack].per_node)
    try:
        found = device(name)
    except PlanError as error:
        raise PlanError(
            f"cluster {text!r}: {error.message}", error.mend or close_names(name)
        ) from error
    return _of_servers(text, found, *_counts(text, first, second))


def server_of(found: Device) -> Server:
    """The server that a device, or the device of which it is a part, is usually found in."""
    return SERVERS[found.name.partition(":")[0]]


def assemble(text: str, found: Device, nodes: int, per_node: int) -> Cluster:
    """A cluster of catalogue servers; a domain wider than a server spans several."""
    server = server_of(found)
    domain = per_node
    if server.domain > server.per_node:
        domain = max(per_node, min(server.domain // per_node, nodes) * per_node)
    inside = server.inside
    if ":" in found.name:  # parts of one GPU reach each other through the host alone
        inside, domain = server.host, 1
    return Cluster(
        name=text,
        device=found,
        nodes=nodes,
        per_node=per_node,
        domain=domain,
        inside=inside,
        between=server.between,
        host=server.host,
        failures=FAILURES,
    )


def _of_servers(text: str, found: Device, first: int | None, second: int | None) -> Cluster:
    server = server_of(found)
    if second is not None:
        nodes, per_node = first or 1, second
    else:
        total = first or 1
        per_node = min(total, server.per_node)
        if total % per_node:
            whole = total // per_node * per_node
            raise PlanError(
                f"cluster {text!r}: {total} {found.name} do not fill servers of {server.per_node}",
                f"use {whole}x{found.name}, or say how they lie: nodes x devices x {found.name}",
            )
        nodes = total // per_node
    if per_node > max(server.most, server.domain):
        raise PlanError(
            f"cluster {text!r}: no server has {per_node} {found.name} on one {server.inside.name}",
            f"use {nodes * per_node // server.per_node or 1}x{server.per_node}x{found.name}, or "
            "describe the domain in a YAML file",
        )
    return assemble(text, found, nodes, per_node)


def _counts(text: str, first: str | None, second: str | None) -> tuple[int | None, int | None]:
    counts = tuple(None if count is None else int(count) for count in (first, second))
    if 0 in counts:
        raise PlanError(f"cluster {text!r} has no devices", "use numbers of 1 and more")
    return counts[0], counts[1]
