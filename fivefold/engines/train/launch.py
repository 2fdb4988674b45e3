"""`--nproc N`: torchrun's elastic agent, started in this process, for N ranks on this machine.

A rank that dies ends the others within a second; its cause is the one line on the screen.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fivefold.core.config import RunConfig
from fivefold.core.errors import TrainingError
from fivefold.engines.train.check import check_run

MONITOR_SECONDS = 0.1
SHUTDOWN_SECONDS = 10  # between SIGTERM (save and leave) and SIGKILL


def launch(nproc: int, config: RunConfig, arguments: list[str]) -> None:
    """Run `fivefold ARGUMENTS` in `nproc` ranks.

    Raises LayoutError before starting any, TrainingError naming the rank that failed first.
    """
    config.layout.check_world(nproc)
    check_run(config)
    # The agent's own warnings repeat what the one line below says.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(agent, sys.executable)("-u", "-m", "fivefold", *arguments)
    except ChildFailedError as error:
        rank, failure = _root_cause(error)
        if failure.exitcode > 0 and _text(failure) == _text(error.failures.get(0)):
            sys.exit(1)  # rank 0 has printed it
        raise TrainingError(*_describe(rank, failure)) from None
    except SignalException as error:
        raise TrainingError(
            f"stopped by {error.sigval.name}", "the same command resumes the run"
        ) from None


def _root_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """A killed rank leaves no message and no time, but it is why the others lost their peer."""
    killed = [
        (rank, failure)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM
    ]
    return killed[0] if killed else error.get_first_failure()


def _describe(rank: int, failure: ProcessFailure) -> tuple[str, str]:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return (
            f"rank {rank} (pid {failure.pid}) was killed by {name}{hint}; the others were stopped",
            "the same command resumes from the last checkpoint",
        )
    cause = _text(failure) or "see its traceback above"
    return f"rank {rank} failed with exit status {failure.exitcode}: {cause}", ""


def _text(failure: ProcessFailure | None) -> str | None:
    """What the rank recorded of its error, without the exception's class; None if nothing."""
    record = None if failure is None else failure.error_file_data.get("message")  # type: ignore[union-attr]
    if not isinstance(record, dict):
        return None
    lines = str(record["message"]).strip().splitlines()
    return lines[0].partition(": ")[2] if lines else None
