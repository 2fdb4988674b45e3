"""One engine process and the two threads that carry messages to it and from it."""

from __future__ import annotations

import asyncio
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from fivefold.engines.serve.server.messages import Command, EngineOptions, Reply, Stop

PROGRAM = "fivefold.engines.serve.server.engine_process"
STOP_SECONDS = 5.0


class EngineLink:
    """Starts a process. `on_reply` and then, once, `on_end` are called in the running loop.

    Reading and writing block, so each has a thread: neither a busy engine nor a large prompt
    holds the loop up.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_reply: Callable[[Reply], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_reply, self._on_end = on_reply, on_end
        self._why: str | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._outbox.put(options)
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command; one to a process that has ended goes nowhere."""
        self._outbox.put(command)

    async def stop(self) -> None:
        """Ask the process to end, then make it."""
        self.send(Stop())
        await asyncio.to_thread(self._wait)

    def end(self, why: str) -> None:
        """End the process at once, one that is stopped too. `why` is what it did, for messages."""
        self._why = why
        self.process.kill()

    def how_it_ended(self) -> str:
        """For messages: what ended the process."""
        status = self.process.wait()
        if self._why is not None:
            return self._why
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}"

    def _read(self) -> None:
        try:
            while True:
                reply = pickle.loads(self._connection.recv_bytes())
                self._tell(self._on_reply, reply)
        except (EOFError, OSError):
            self._outbox.put(None)
            self._wait()
            self._connection.close()
            self._tell(self._on_end)

    def _wait(self) -> None:
        """Until the process has ended; one that says nothing more is of no use."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            except OSError:  # the reading side says so
                return

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens
            return
