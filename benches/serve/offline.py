"""Every peer's engine on the same prompts, in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from cases import Case
from peers.peer import Options, Peer
from venvs import python_of

HERE = Path(__file__).resolve().parent


class Worker:
    """A peer's process. Its log lies beside the results."""

    def __init__(self, peer: type[Peer], options: Options, log: Path) -> None:
        given = {key: str(v) if isinstance(v, Path) else v for key, v in asdict(options).items()}
        command = [python_of(peer), HERE / "worker.py", peer.name, json.dumps(given)]
        environment = os.environ | peer.environment(options)
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=environment, cwd=HERE.parents[1],
            )  # fmt: skip
        self._log = log
        self.load_seconds: float = self._read()["loaded"]

    def seconds(self, case: Case, seed: int, output: int) -> float:
        """How long it takes over a round's prompts."""
        assert self.process.stdin is not None
        asked = {"prompts": case.prompts(seed), "output": output}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        found = self._read()
        if found["counts"] != [output] * case.requests:
            raise RuntimeError(f"{output} tokens each were asked for, but came {found['counts']}")
        return float(found["seconds"])

    def peak_bytes(self) -> int:
        """Most memory it has had, with its children's."""
        root = psutil.Process(self.process.pid)
        return sum(_high_water(p.pid) for p in [root, *root.children(recursive=True)])

    def stop(self) -> None:
        """End it."""
        with suppress(OSError):
            self.process.communicate(timeout=30)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else "it ended without a word")
        found: dict[str, Any] = json.loads(line)
        return found


def measure(
    peers: Sequence[type[Peer]], cases: Sequence[Case], options: Options, rounds: int, logs: Path
) -> dict[str, dict[str, Any]]:
    """By peer: what it took, or why it failed. The order changes with each round."""
    found: dict[str, dict[str, Any]] = {}
    workers: dict[str, Worker] = {}
    for peer in peers:
        try:
            workers[peer.name] = Worker(peer, options, logs / f"{peer.name}.log")
        except RuntimeError as error:
            found[peer.name] = {"failed": str(error)}
            continue
        found[peer.name] = {"load_seconds": workers[peer.name].load_seconds, "cases": {}}
    for case in cases:
        times: dict[str, list[tuple[float, float | None]]] = {name: [] for name in workers}
        for index in range(rounds + 1):
            for name in list(workers)[:: 1 if index % 2 else -1]:
                try:
                    taken = _once(workers[name], case, index)
                except RuntimeError as error:
                    found[name]["failed"] = f"case {case.name}: {error}"
                    workers.pop(name).stop()
                    continue
                if index:  # the first round warms up
                    times[name].append(taken)
        for name in workers:
            found[name]["cases"][case.name] = {
                "seconds": statistics.median(seconds for seconds, _ in times[name]),
                "first": _median([first for _, first in times[name]]),
                "all": times[name],
            }
    for name, worker in workers.items():
        found[name]["peak_bytes"] = worker.peak_bytes()
        worker.stop()
    return found


def _once(worker: Worker, case: Case, index: int) -> tuple[float, float | None]:
    """(seconds of all, seconds to the first token): the latter is an answer of one token."""
    first = None
    if case.requests == 1 and case.output > 1:
        first = worker.seconds(case, -index - 1, 1)
    return worker.seconds(case, index, case.output), first


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _high_water(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0
