"""The process of every rank but the first: orders in, one answer each.

Started by `processes.py` as `python -m ...rank_process DESCRIPTOR`, where the descriptor is its end
of a pair of sockets. It ends when the other end is closed, or with the first error: ranks that have
lost one of them cannot go on.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from fivefold.core.errors import FivefoldError, one_line
from fivefold.engines.serve.parallel.group import join_group
from fivefold.engines.serve.parallel.messages import (
    Broken,
    Done,
    Head,
    Hello,
    NewWeights,
    Order,
    Profile,
    Repack,
    Reply,
    Sleep,
    Start,
    States,
    Step,
    TakeCache,
    WakeUp,
)
from fivefold.engines.serve.parallel.rank import Rank
from fivefold.kernels.dispatch import set_deterministic
from fivefold.weights.open import open_source


def load(start: Start) -> Rank:
    """Meet the other ranks and load a part. Raises FivefoldError."""
    torch.set_num_threads(start.threads)
    set_deterministic(start.deterministic)
    device = torch.device(start.device)
    join_group(device, start.rank, start.layout.world_size, start.port)
    return Rank(
        open_source(start.model), start.layout, start.dtype, device, start.memory_share
    )  # fmt: skip


def obey(rank: Rank, order: Order) -> Reply | None:
    """Do as told; None where the answer is in what goes from rank to rank."""
    match order:
        case Step():
            rank.step(order)
            return None
        case Head(places=places):
            rank.head(places)
            return None
        case States(tokens=tokens):
            rank.states(tokens)
            return None
        case Profile():
            return rank.profile(order)[0]
        case TakeCache():
            rank.take_cache(order)
        case NewWeights(values=values):
            rank.weights.update(values, partial=True)
            return None
        case Sleep(level=level):
            rank.weights.sleep(level)
        case WakeUp(values=values):
            rank.weights.wake_up(values)
        case Repack():
            rank.repack()
    return Done()


def main() -> None:
    """Load, say so, and obey."""
    # A terminal's Ctrl-C reaches all processes; rank 0 alone decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))

    def say(reply: Reply) -> None:
        connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))

    try:
        start = pickle.loads(connection.recv_bytes())
        say(Hello())
        rank = load(start)
        say(rank.loaded())
        while True:
            reply = obey(rank, pickle.loads(connection.recv_bytes()))
            if reply is not None:
                say(reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # rank 0 is gone
        return
    except FivefoldError as error:
        last = Broken(error.message, error.mend, time.time())
    except Exception as error:
        last = Broken(f"{type(error).__name__}: {one_line(error)}", "", time.time())
    try:
        say(last)
    except OSError:  # nobody is left to tell
        return
    sys.exit(1)


if __name__ == "__main__":
    main()
