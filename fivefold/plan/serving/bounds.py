"""What no number of devices can undercut: why some traffic is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.engines.serve.load.slo import Slo
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.step import decode_step, prefill
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.traffic import Traffic
from fivefold.plan.shape import ModelShape


@dataclass(frozen=True)
class Bounds:
    """Seconds that a request alone on the best of the engines takes."""

    ttft: float
    ttft_layout: str
    tpot: float
    tpot_layout: str


def bounds(
    shape: ModelShape, engines: Sequence[ServingStrategy], cluster: Cluster,
    input_tokens: int, output_tokens: int,
) -> Bounds:  # fmt: skip
    """Of a request of these lengths."""
    reads = [
        (each.system.front + prefill(shape, each, cluster, input_tokens), str(each.layout))
        for each in engines
    ]
    steps = [
        (decode_step(shape, each, cluster, 1, input_tokens + output_tokens / 2), str(each.layout))
        for each in engines
    ]
    return Bounds(*min(reads), *min(steps))


def check_possible(
    shape: ModelShape, engines: Sequence[ServingStrategy], cluster: Cluster,
    traffic: Traffic, slo: Slo,
) -> Bounds:  # fmt: skip
    """Raise PlanError, saying the bound, for limits below what one request alone takes."""
    fitting = [
        each for each in engines if room(shape, each, cluster).tokens >= traffic.longest
    ]  # fmt: skip
    if not fitting:
        held = max(room(shape, each, cluster).tokens for each in engines)
        raise PlanError(
            f"the longest request has {traffic.longest} tokens with its answer, but the cache of"
            f" an engine of {cluster.name} holds {held}",
            "cut the requests, use narrower keys and values (--kv fp8), or more devices an engine",
        )
    prompt, answer = round(traffic.input_tokens), round(traffic.output_tokens)
    found = bounds(shape, fitting, cluster, prompt, answer)
    if slo.get("ttft", found.ttft) < found.ttft:
        raise PlanError(
            f"a TTFT of {slo['ttft'] * 1e3:.0f} ms is impossible: reading {prompt} tokens takes"
            f" {found.ttft * 1e3:.0f} ms at least on {cluster.device.name} ({found.ttft_layout})",
            f"allow more than that, or shorten prompts; the cluster is {cluster.name}",
        )
    if slo.get("tpot", found.tpot) < found.tpot:
        raise PlanError(
            f"a TPOT of {slo['tpot'] * 1e3:.1f} ms is impossible: a token of one answer alone"
            f" takes {found.tpot * 1e3:.1f} ms at least on {cluster.device.name}"
            f" ({found.tpot_layout})",
            "allow more than that, use narrower weights (--weights fp8), or speculation",
        )
    alone = found.ttft + (answer - 1) * found.tpot
    if slo.get("e2e", alone) < alone:
        raise PlanError(
            f"answers within {slo['e2e']:.2f} s are impossible: one alone takes {alone:.2f} s on"
            f" {cluster.device.name}",
            "allow more than that, or ask for fewer tokens",
        )
    return found
