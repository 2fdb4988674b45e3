"""Who does tasks: this process, or several. Both give the same results in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from fivefold.core.errors import DataError, TokenizerError
from fivefold.engines.train.data.encode import Encoded, Encoder
from fivefold.engines.train.data.tasks import Task
from fivefold.engines.train.data.worker import count_documents
from fivefold.text.tokenizer import Tokenizer


class Runner(Protocol):
    """Does tasks, answering in their order."""

    def check(self, tasks: Iterable[Task]) -> Iterator[int]:
        """Documents of each task. Raises DataError for the first malformed one."""
        ...

    def encode(self, tasks: Iterable[Task]) -> Iterator[Encoded]:
        """Tokens of each task."""
        ...


class InProcess:
    """Everything here, one task after the other (the tokenizer itself uses threads)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoder = Encoder(tokenizer)

    def check(self, tasks: Iterable[Task]) -> Iterator[int]:
        """See Runner."""
        return map(count_documents, tasks)

    def encode(self, tasks: Iterable[Task]) -> Iterator[Encoded]:
        """See Runner."""
        return map(self._encoder.encode, tasks)


class WorkerPool:
    """`count` processes of `worker`, each fed by a thread.

    Not multiprocessing: that runs the main module of a user's script once more in each process,
    and leaves them behind when this one is killed.
    """

    def __init__(self, count: int, scratch: Path, fingerprint: str) -> None:
        self._scratch = scratch
        self._tokenizer = {"tokenizer": str(scratch / "tokenizer"), "fingerprint": fingerprint}
        self._processes = [_start() for _ in range(count)]
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count)

    def check(self, tasks: Iterable[Task]) -> Iterator[int]:
        """See Runner."""
        answers = self._threads.map(lambda t: self._ask({"task": t.to_json()}), tasks)
        return (answer["documents"] for answer in answers)

    def encode(self, tasks: Iterable[Task]) -> Iterator[Encoded]:
        """See Runner."""
        for out in self._threads.map(self._encode, enumerate(tasks)):
            encoded = Encoded.load(out)
            out.unlink()
            yield encoded

    def _encode(self, numbered: tuple[int, Task]) -> Path:
        number, task = numbered
        out = self._scratch / f"task-{number:08d}.npz"
        self._ask({"task": task.to_json(), "out": str(out), **self._tokenizer})
        return out

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._free.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            self._free.put(process)
        if not line:
            where = request["task"]["pieces"][0]["path"]
            raise DataError(
                f"a tokenizing process ended with status {process.wait()} while reading {where}",
                "if memory ran out, lower data.workers",
            )
        answer = json.loads(line)
        if "error" in answer:
            name, message, mend = answer["error"]
            raise (TokenizerError if name == "TokenizerError" else DataError)(message, mend)
        return answer

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            with suppress(BrokenPipeError):  # what was not sent is not wanted any more
                process.stdin.close()  # type: ignore[union-attr]
            process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def worker_pool(count: int, tokenizer: Tokenizer, scratch: Path) -> Iterator[WorkerPool]:
    """A pool of processes with `tokenizer`, which passes through files under `scratch`."""
    tokenizer.save(scratch / "tokenizer")
    pool = WorkerPool(count, scratch, tokenizer.fingerprint())
    try:
        yield pool
    finally:
        pool.close()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fivefold.engines.train.data.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
