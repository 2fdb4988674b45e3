"""How much of the time a long run makes progress: interruptions, checkpoints, what is computed again.

M mean seconds between interruptions of the job, d seconds that a checkpoint holds training up, R from an
interruption until training goes on, t between checkpoints. Interruptions come at random (Poisson);
one throws away what was done since the last checkpoint. The expected time for t seconds of progress is

    M exp(R/M) (exp((t + d)/M) - 1)                                  (Daly 2006, equation 13)

and the best t is about sqrt(2 d M) (Young 1974), or Daly's next order

    sqrt(2 d M) (1 + sqrt(d/2M) / 3 + (d/2M) / 9) - d   for d < 2M, else M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.cluster import Cluster


@dataclass(frozen=True)
class Reported:
    """A published run or cluster: interruptions of a device in an hour."""

    name: str
    rate: float
    source: str

    def between(self, devices: int) -> float:
        """Mean hours between interruptions of a job on so many devices."""
        return 1 / (self.rate * devices)


REPORTED = (
    Reported(
        "Llama 3 405B", 419 / (54 * 24 * 16_384),
        "419 unexpected interruptions in 54 days of 16,384 H100 (2407.21783, section 3.3.4)",
    ),
    Reported(
        "OPT-175B", 35 / (60 * 24 * 992),
        "at least 35 manual restarts in two months of 992 A100 (2205.01068, section 2.5)",
    ),
    Reported(
        "BLOOM", 1.5 / (7 * 24 * 384),
        "one or two failed devices a week of 384 A100 (2211.05100, section 3.3)",
    ),
    Reported(
        "Meta RSC-1", 6.5 / (1000 * 24 * 8),
        "6.5 failures in 1,000 node-days of 8 A100 (Kokolis et al. 2024, 2410.21680)",
    ),
    Reported(
        "Meta RSC-2", 2.34 / (1000 * 24 * 8),
        "2.34 failures in 1,000 node-days of 8 A100 (Kokolis et al. 2024, 2410.21680)",
    ),
)  # fmt: skip
# Of instances that a cloud may take back: an hour's share of them. Thorpe et al. 2023 (2204.12013) train
# through 10, 16 and 33 percent an hour.
RECLAIMED = 0.10


@dataclass(frozen=True)
class Goodput:
    """Of a job's wall time: shares that add up to 1.

    share: progress. checkpoints: waiting for them. lost: computed again after an interruption.
    restarts: between an interruption and going on. Times are in seconds.
    """

    share: float
    checkpoints: float
    lost: float
    restarts: float
    interval: float
    between: float

    @property
    def interruptions_a_day(self) -> float:
        """Of the whole job."""
        return 86_400 / self.between if self.between else 0.0


def young(between: float, checkpoint: float) -> float:
    """Seconds between checkpoints, first order."""
    return math.sqrt(2 * checkpoint * between)


def daly(between: float, checkpoint: float) -> float:
    """Seconds between checkpoints, higher order."""
    if checkpoint >= 2 * between:
        return between
    half = checkpoint / (2 * between)
    return young(between, checkpoint) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint


def goodput(
    cluster: Cluster,
    devices: int | None = None,
    *,
    checkpoint: float = 5.0,
    restart: float | None = None,
    interval: float | None = None,
    failures: float | None = None,
) -> Goodput:
    """Of a job on `devices` (all of the cluster's) with the best interval, or a given one.

    checkpoint: seconds that training waits for one (staging, if it is written behind training's
    back). `restart`, `failures` (a device and hour): the cluster's own if not given. Raises
    PlanError for numbers that no time can have.
    """
    count = cluster.devices if devices is None else devices
    rate = cluster.failures if failures is None else failures
    again = cluster.restart if restart is None else restart
    for what, number in (("checkpoint", checkpoint), ("restart", again), ("failures", rate)):
        if not 0 <= number < math.inf:
            raise PlanError(f"goodput cannot have {what}={number:g}", "use 0 or more")
    if interval is not None and not 0 < interval < math.inf:
        raise PlanError(f"checkpoints cannot be {interval:g} seconds apart", "use more than 0")
    if not rate:
        held = checkpoint / (interval + checkpoint) if interval else 0.0
        return Goodput(1 - held, held, 0.0, 0.0, interval or math.inf, 0.0)
    between = 3600 / (rate * count)
    apart = interval or max(1.0, daly(between, max(checkpoint, 1e-3)))
    return _expected(between, apart, checkpoint, again)


def _expected(between: float, apart: float, checkpoint: float, restart: float) -> Goodput:
    needed = between * math.exp(min(700.0, restart / between))
    needed *= math.expm1(min(700.0, (apart + checkpoint) / between))
    share = apart / needed
    held = checkpoint / needed
    stopped = 1 - share - held
    # An interruption costs the restart, and on average what was done since the last checkpoint.
    undone = (apart + checkpoint) / 2
    restarts = stopped * restart / (restart + undone)
    return Goodput(share, held, stopped - restarts, restarts, apart, between)


def on_spot(cluster: Cluster, reclaimed: float = RECLAIMED) -> float:
    """Interruptions of a device and hour where a share `reclaimed` of the nodes is taken back an hour."""
    return cluster.failures + reclaimed / cluster.per_node


def slowest(devices: int, deviation: float) -> float:
    """How much longer the slowest of `devices` takes than the mean, whose times vary by `deviation`.

    The expected largest of n normal numbers, by the first terms of its expansion. All wait for it where
    ranks synchronise. Published step times have this in them, so the planner's own do not add it.
    """
    if devices < 2:
        return 1.0
    root = math.sqrt(2 * math.log(devices))
    largest = root - (math.log(math.log(devices)) + math.log(4 * math.pi)) / (2 * root)
    largest += 0.5772 / root  # Euler's constant: the mean of what is left
    return 1 + deviation * max(0.0, largest)
