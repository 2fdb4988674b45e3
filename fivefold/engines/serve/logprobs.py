"""Log-probabilities as they are reported: of the chosen token and of the likeliest ones."""

# B batch, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server's own process reads these records without torch
    from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability under the model and its rank (1: the most likely)."""

    logprob: float
    rank: int


def report(
    logits: Tensor, chosen: Tensor, asked: Sequence[int | None]
) -> list[dict[int, Logprob] | None]:
    """Of raw logits [B,V] and tokens [B]: {token: Logprob} for rows that ask for n likeliest.

    The chosen token first, then the most likely ones, as in vLLM. None for rows that ask None.
    """
    most = max((n for n in asked if n is not None), default=-1)
    if most < 0:
        return [None] * len(asked)
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, chosen[:, None])
    ranks = (logprobs > own).sum(dim=-1).tolist()
    likeliest = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    rows = zip(
        asked, chosen.tolist(), own[:, 0].tolist(), ranks, likeliest.indices.tolist(),
        likeliest.values.tolist(), strict=True,
    )  # fmt: skip
    return [_of_row(*row) for row in rows]


def _of_row(
    asked: int | None,
    token: int,
    logprob: float,
    better: int,
    top_ids: list[int],
    top_values: list[float],
) -> dict[int, Logprob] | None:
    if asked is None:
        return None
    found = {token: Logprob(logprob, better + 1)}
    for rank, (other, value) in enumerate(zip(top_ids, top_values, strict=True), start=1):
        if rank > asked:
            break
        found.setdefault(other, Logprob(value, rank))
    return found
