"""Ranks that would read different data stop before the first step, all with one message."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fivefold.core.environment import Ranks
from fivefold.core.errors import DataError
from fivefold.core.layout import Layout
from fivefold.engines.train.process import Process
from fivefold.engines.train.run import _check_same_data
from tests.dist.cases import mesh_of
from tests.dist.harness import Workers


def check(strange: int | None) -> str:
    rank = dist.get_rank()
    mesh = mesh_of(Layout(dp_replicate=2))
    process = Process(Ranks(rank, 2, rank, 2, 0), torch.device("cpu"), mesh)
    corpus: Any = SimpleNamespace(fingerprint="other" if rank == strange else "same")
    try:
        _check_same_data(process, corpus)
    except DataError as error:
        return error.message
    return ""


def test_it_names_the_rank(workers: Callable[[int], Workers]) -> None:
    assert workers(2).run(check, None) == ["", ""]
    message = "rank 1 reads other documents or another tokenizer than rank 0"
    assert workers(2).run(check, 1) == [message] * 2
