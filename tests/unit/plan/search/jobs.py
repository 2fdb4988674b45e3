"""Jobs that tests search."""

from __future__ import annotations

from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.search.job import Job
from fivefold.plan.software import software
from fivefold.plan.workload import Training


def job(
    model: str, on: str, sequence: int, batch: int, system: str = "fivefold", **more: object
) -> Job:
    training = Training(sequence, batch, **more)  # type: ignore[arg-type]
    return Job(shape(model), training, cluster(on), software(system))
