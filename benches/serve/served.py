"""Every peer's OpenAI server under the same load, with fivefold's own load code."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import VOCABULARY, Case
from peers.peer import Options, Peer
from venvs import python_of

from fivefold.core.errors import FivefoldError
from fivefold.engines.serve.load.session import bench
from fivefold.engines.serve.load.settings import LoadSettings

START_SECONDS = 600


def measure(
    peers: Sequence[type[Peer]], cases: Sequence[Case], options: Options, rounds: int, logs: Path
) -> dict[str, dict[str, Any]]:
    """By peer: what it took, or why it failed. Two threads hold one server at a time."""
    found: dict[str, dict[str, Any]] = {}
    for peer in peers:
        if peer.no_server:
            found[peer.name] = {"failed": f"no server: {peer.no_server}"}
            continue
        try:
            with _running(peer, options, logs / f"{peer.name}-server.log") as (url, ready):
                results = {case.name: _load(peer, case, url, rounds) for case in cases}
                found[peer.name] = {"load_seconds": ready, "cases": results}
        except (RuntimeError, FivefoldError) as error:
            found[peer.name] = {"failed": str(error)}
    return found


def _load(peer: type[Peer], case: Case, url: str, rounds: int) -> dict[str, Any]:
    """A round is one wave of a case's requests; all waves run as one closed loop."""
    session = bench(
        LoadSettings(
            url, workload="fixed", input_tokens=case.input, output_tokens=case.output,
            shared_prefix=case.shared, concurrency=(case.requests,),
            requests=case.requests * rounds, vocabulary=VOCABULARY, warmup=case.requests,
            prompts_as="text" if peer.text_only else "ids",
        )
    )  # fmt: skip
    (summary,) = session.summaries
    if summary.failures:
        raise RuntimeError(f"case {case.name}: {summary.failures} {summary.examples}")
    ttft, e2e = summary.latencies["ttft"], summary.latencies["e2e"]
    assert ttft is not None and e2e is not None
    seconds = e2e.percentiles[50] if case.requests == 1 else summary.seconds / rounds
    return {"seconds": seconds, "first": ttft.percentiles[50], "summary": summary.record()}


@contextmanager
def _running(peer: type[Peer], options: Options, log: Path) -> Iterator[tuple[str, float]]:
    """(address, seconds until it answered)."""
    port = _free_port()
    command = peer.server(options, str(python_of(peer)), port)
    environment = os.environ | peer.environment(options)
    began = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            if process.poll() is not None:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(lines[-1] if lines else "the server ended without a word")
            if time.perf_counter() - began > START_SECONDS:
                raise RuntimeError(f"the server was not ready after {START_SECONDS} s")
            time.sleep(0.1)
        yield url, time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
