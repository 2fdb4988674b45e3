"""Saves in forked processes that are killed at chosen points; prints what went wrong, if anything.

Run as a program, so that forking meets no thread pools of the tests' process.
    crash_driver.py every FOLDER N   kill -9 before each N-th file operation of a run of saves
    crash_driver.py random FOLDER N  kill -9 at N moments drawn at random, saving in the background
    crash_driver.py limit FOLDER     a file size limit of the kernel (RLIMIT_FSIZE) stops the save
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_cases import Watched, assert_loads, die, make_checkpointer, make_state

from fivefold.core.errors import CheckpointError

# Saved one after the other with keep=1: retention, best, and a step saved over itself.
RUN = [(1, True), (2, False), (2, False), (3, True)]


def in_child(
    work: Callable[[Callable[[int], None]], None], kill_after: float | None = None
) -> tuple[list[int], int]:
    """Run `work(acknowledge)` in a fork: what it acknowledged, and its exit status."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            work(lambda step: os.write(writer, struct.pack("<i", step)) and None)
            os._exit(0)
        except BaseException as error:
            print(f"child failed: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
    os.close(writer)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    data = b""
    while block := os.read(reader, 4096):
        data += block
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return [step for (step,) in struct.iter_unpack("<i", data)], status


def check(folder: Path, acknowledged: list[int], in_flight: int | None) -> None:
    """A restart finds the last acknowledged save, or the one whose answer was cut off."""
    seen = make_checkpointer_latest(folder)
    if not acknowledged and seen is None:
        return
    allowed = set(acknowledged[-1:]) | ({in_flight} if in_flight is not None else set())
    assert seen in allowed, f"latest is {seen}, acknowledged {acknowledged}, next {in_flight}"
    assert_loads(folder, seen)
    leftovers = [p.name for p in folder.iterdir() if p.name.endswith((".partial", ".replaced"))]
    assert not leftovers, leftovers


def make_checkpointer_latest(folder: Path) -> int | None:
    latest = make_checkpointer(folder).latest()
    return None if latest is None else int(latest.name[5:])


def every(folder: Path, stride: int) -> int:
    point = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)

        def work(acknowledge: Callable[[int], None], point: int = point) -> None:
            checkpointer = make_checkpointer(folder, keep=1, files=Watched(point, die))
            for step, best in RUN:
                checkpointer.save(make_state(step), best=best)
                acknowledge(step)

        acknowledged, status = in_child(work)
        if status == 0:  # there is no such point: the run is over
            return point
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        if folder.exists():
            check(folder, acknowledged, RUN[len(acknowledged)][0])
            if point % (5 * stride) == 0:  # and it can go on saving
                make_checkpointer(folder, keep=1).save(make_state(50))
                assert_loads(folder, 50)
        point += stride


def at_random(folder: Path, times: int) -> int:
    moments = random.Random(0)
    for _ in range(times):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make_checkpointer(folder, keep=1).save(make_state(0))

        def work(acknowledge: Callable[[int], None]) -> None:
            checkpointer = make_checkpointer(folder, keep=1, asynchronous=True)
            for step in range(1, 1000):
                checkpointer.save(make_state(step), best=step % 3 == 0)
                checkpointer.wait()
                acknowledge(step)

        acknowledged, status = in_child(work, kill_after=moments.uniform(0.0, 0.15))
        assert os.WIFSIGNALED(status), status
        acknowledged.insert(0, 0)
        check(folder, acknowledged, acknowledged[-1] + 1)
    return times


def limit(folder: Path) -> int:
    make_checkpointer(folder).save(make_state(1))

    def work(acknowledge: Callable[[int], None]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        for asynchronous in (False, True):
            checkpointer = make_checkpointer(folder, asynchronous=asynchronous)
            try:
                checkpointer.save(make_state(2))
                checkpointer.wait()
            except CheckpointError as error:
                print(error)
                acknowledge(1)

    answers, status = in_child(work)
    assert status == 0 and len(answers) == 2, (answers, status)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    assert_loads(folder, 1)
    return 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, where = sys.argv[1], Path(sys.argv[2])
    if command == "every":
        print("points", every(where, int(sys.argv[3])))
    elif command == "random":
        print("points", at_random(where, int(sys.argv[3])))
    else:
        print("points", limit(where))
