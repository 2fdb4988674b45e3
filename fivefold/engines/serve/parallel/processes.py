"""The processes of all ranks but the first: started, spoken to, watched, ended."""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from fivefold.core.errors import one_line
from fivefold.engines.serve.parallel.errors import RankError
from fivefold.engines.serve.parallel.messages import Broken, Order, Reply, Start

PROGRAM = "fivefold.engines.serve.parallel.rank_process"
LAST_WORDS_SECONDS = 3.0
"""For ranks that lost one of them to say so, before the cause is named."""
POLL_SECONDS = 0.02
MEND = "start the engine again"

R = TypeVar("R", bound=Reply)


class RankProcesses:
    """Ranks 1 and up. They end with this object, and with this process."""

    def __init__(self, count: int) -> None:
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._words: list[tuple[float, int, Broken]] = []
        self._end = weakref.finalize(self, _end, self._processes, self.connections)
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self.connections.append(Connection(ours.detach()))
            self._processes.append(process)

    def send(self, rank: int, message: Order | Start) -> None:
        """To one rank."""
        self.connections[rank - 1].send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_all(self, message: Order) -> None:
        """The same to every rank."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in self.connections:
            connection.send_bytes(data)

    def receive_all(self, kind: type[R]) -> list[R]:
        """The next answer of each. Raises EOFError or RankError for a rank that has ended."""
        found = []
        for rank, connection in enumerate(self.connections, start=1):
            reply = pickle.loads(connection.recv_bytes())
            if isinstance(reply, Broken):
                self._words.append((reply.at, rank, reply))
                raise RankError(f"rank {rank} failed: {reply.why}", reply.mend or MEND)
            assert isinstance(reply, kind), f"{kind} was asked for, {reply} came"
            found.append(reply)
        return found

    def cause(self, noticed: BaseException) -> RankError:
        """What ended the ranks, of which `noticed` is what rank 0 saw just now.

        A killed rank says nothing, but it is why the others lost their peer; else the first to
        fail is the cause.
        """
        own = Broken(f"{type(noticed).__name__}: {one_line(noticed)}", "", time.time())
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, start=1):
                if (process.poll() or 0) < 0:
                    name = signal.Signals(-process.returncode).name
                    hint = " (out of memory?)" if name == "SIGKILL" else ""
                    return RankError(
                        f"rank {rank} (pid {process.pid}) was killed by {name}{hint}", MEND
                    )
            if all(process.poll() is not None for process in self._processes):
                break
            time.sleep(POLL_SECONDS)
        self._hear_last_words()
        _, rank, last = min((*self._words, (own.at, 0, own)), key=lambda word: word[0])
        return RankError(f"rank {rank} failed: {last.why}", last.mend or MEND)

    def _hear_last_words(self) -> None:
        for rank, connection in enumerate(self.connections, start=1):
            with suppress(EOFError, OSError):
                while connection.poll(0):
                    reply = pickle.loads(connection.recv_bytes())
                    if isinstance(reply, Broken):
                        self._words.append((reply.at, rank, reply))

    def stop(self) -> None:
        """End all of them."""
        self._end()


def _end(processes: Sequence[subprocess.Popen[bytes]], connections: Sequence[Connection]) -> None:
    for process in processes:
        process.kill()  # they hold nothing that is not here, and may wait for each other
    for process in processes:
        process.wait()
    for connection in connections:
        connection.close()
