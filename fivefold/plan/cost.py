"""Days, energy and money of a whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.plan.goodput import Goodput, goodput, on_spot
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.time.result import StepTime
from fivefold.plan.workload import Training

# What a server takes beside its devices (processors, memory, network, fans), and a building beside its
# servers. DGX H100: 10.2 kW for eight devices of 700 W at most, some 8.4 kW in training (assumed).
SERVER = 1.5
BUILDING = 1.15


@dataclass(frozen=True)
class RunCost:
    """Of all tokens. `dollars` is None where the catalogue has no price.

    days: wall time, with interruptions; infinite (and no dollars) where a job is interrupted so often
    that it makes progress less than a hundredth of the time. energy: kWh of servers and building.
    """

    steps: float
    days: float
    device_hours: float
    energy: float
    dollars: float | None
    goodput: Goodput
    price: float | None


def run_cost(
    step: StepTime,
    training: Training,
    cluster: Cluster,
    devices: int | None = None,
    *,
    spot: bool = False,
    checkpoint: float = 5.0,
) -> RunCost:
    """Of `training.tokens` at the step's rate on `devices` (all of the cluster's).

    spot: with devices that may be taken back, at their price. Raises PlanError without tokens.
    """
    if not training.tokens:
        raise PlanError("a run's cost depends on how long it is", "give tokens, e.g. tokens=1T")
    count = cluster.devices if devices is None else devices
    failures = on_spot(cluster) if spot else None
    found = goodput(cluster, count, checkpoint=checkpoint, failures=failures)
    never = found.share < 0.01
    seconds = math.inf if never else training.tokens / step.tokens_per_second / found.share
    hours = seconds / 3600 * count
    price = cluster.device.spot_price if spot else cluster.device.price
    watts = cluster.device.watts * SERVER * BUILDING
    return RunCost(
        steps=training.tokens / (training.global_batch * training.sequence),
        days=seconds / 86_400,
        device_hours=hours,
        energy=hours * watts / 1000,
        dollars=None if price is None or never else hours * price,
        goodput=found,
        price=price,
    )
