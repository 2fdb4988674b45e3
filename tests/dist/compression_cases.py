"""Compressors on ranks, and what the papers' algorithms give in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.dp.bucket import Bucket
from fivefold.axes.dp.compression.choose import choose
from fivefold.axes.dp.compression.power_sgd import PowerSGD, _first, is_worth
from fivefold.axes.dp.compression.protocol import Compressor
from fivefold.axes.dp.compression.top_k import TopK
from fivefold.core.config import CommunicationSection
from fivefold.engines.train.data.batch import Batch
from tests.dist import cases

SHAPES = {"a": (24, 16), "b": (7,), "small": (3, 2), "experts": (3, 10, 12), "c": (16, 40)}
STEPS = 4
ROOT = Path(__file__).resolve().parents[2]


def section(kind: str, **values: Any) -> CommunicationSection:
    return CommunicationSection(compression=kind, **values)


def gradients(rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """fp64, other ones on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def make(chosen: CommunicationSection, dtype: torch.dtype) -> tuple[Compressor, Bucket, Tensor]:
    parameters = tuple(nn.Parameter(torch.empty(s, dtype=dtype)) for s in SHAPES.values())
    bucket = Bucket(tuple(SHAPES), parameters)
    flat = bucket.zeros()
    group = dist.group.WORLD
    assert group is not None
    return choose(chosen, dtype)(bucket, group), bucket, flat


def finish(compressor: Compressor, flat: Tensor) -> None:
    for works in compressor.reduce(flat):
        for work in works:
            work.wait()


def reduced(
    chosen: CommunicationSection,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
    fault: str | None = None,
) -> dict[str, Any]:
    """The sums of each step by name, the memories at the end, and bytes handed to collectives."""
    sent: list[int] = []
    with FAULTS[fault]() if fault else nullcontext(), _counting(sent):
        compressor, bucket, flat = make(chosen, dtype)
        steps = []
        for step in range(STEPS):
            mine = gradients(dist.get_rank(), step, scale)
            for view, name in zip(bucket.views(flat), bucket.names, strict=True):
                view.copy_(mine[name])
            sent.clear()
            finish(compressor, flat)
            views = bucket.views(flat)
            steps.append({n: v.clone() for n, v in zip(bucket.names, views, strict=True)})
    state = {name: tensor.clone() for name, tensor in compressor.state().items()}
    return {"steps": steps, "state": state, "bytes": sum(sent)}


def _counting(sent: list[int]) -> Any:
    """Bytes of every tensor that this rank gives to a collective."""
    from contextlib import ExitStack

    real_sum, real_gather = dist.all_reduce, dist.all_gather_single

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real_sum(tensor, *args, **kwargs)

    def all_gather(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real_gather(output, tensor, *args, **kwargs)

    both = ExitStack()
    both.enter_context(mock.patch("torch.distributed.all_reduce", all_reduce))
    both.enter_context(mock.patch("torch.distributed.all_gather_single", all_gather))
    return both


def power_sgd(total: Sequence[dict[str, Tensor]], rank: int) -> list[dict[str, Tensor]]:
    """The paper's algorithms 1 and 2 on the sum of all gradients, a matrix at a time."""
    factors = {n: _first(n, torch.Size((*s[:-2], s[-1], rank))).double() if len(s) > 1 else None
               for n, s in SHAPES.items()}  # fmt: skip
    memory = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    found = []
    for step in total:
        found.append({})
        for name, gradient in step.items():
            right = factors[name]
            if right is None or not is_worth(SHAPES[name], rank):
                found[-1][name] = gradient
                continue
            whole = gradient + memory[name]
            each = whole.reshape(-1, *whole.shape[-2:])
            rights = right.reshape(-1, *right.shape[-2:])
            for i in range(len(each)):
                left = gram_schmidt(each[i] @ rights[i])
                rights[i] = each[i].T @ left
                each[i] = left @ rights[i].T
            found[-1][name] = each.view_as(gradient).clone()
            memory[name] = gradient + memory[name] - found[-1][name]
            factors[name] = rights.view_as(right)
    return [*found, memory]


def gram_schmidt(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.clone().T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def top_k(ranks: int, count: int) -> list[Tensor]:
    """Stich et al.'s Mem-SGD on each worker's own flat gradients; then the sum of the memories."""
    memory = [torch.zeros(1, dtype=torch.float64)] * ranks
    found = []
    for step in range(STEPS):
        total = 0
        for rank in range(ranks):
            own = memory[rank] + torch.cat([g.flatten() for g in gradients(rank, step).values()])
            order = sorted(range(len(own)), key=lambda i: -abs(float(own[i])))
            sent = torch.zeros_like(own)
            sent[order[:count]] = own[order[:count]]
            memory[rank], total = own - sent, total + sent
        found.append(total)
    return [*found, sum(memory)]  # type: ignore[list-item]


# Mistakes planted on purpose.


def feedback_dropped() -> Any:
    """What was not sent is forgotten."""
    from contextlib import ExitStack

    both = ExitStack()
    for kind in (PowerSGD, TopK):
        both.enter_context(mock.patch.object(kind, "reduce", _forgetting(kind.reduce)))
    return both


def _forgetting(real: Any) -> Any:
    def reduce(self: Any, flat: Tensor) -> Any:
        yield from real(self, flat)
        for name, tensor in self.state().items():
            if name.startswith("memory/"):
                tensor.zero_()

    return reduce


def not_orthonormal() -> Any:
    """Left factors as they come: the approximation has another scale."""
    return mock.patch("torch.linalg.qr", lambda x: mock.Mock(Q=x))


def cold_start() -> Any:
    """Each step starts from the first factors again."""
    real = PowerSGD.reduce

    def reduce(self: PowerSGD, flat: Tensor) -> Any:
        for name, right in self.state().items():
            if name.startswith("right/"):
                right.copy_(_first(name.removeprefix("right/"), right.shape))
        yield from real(self, flat)

    return mock.patch.object(PowerSGD, "reduce", reduce)


def own_right_factors() -> Any:
    """Right factors are not summed: each rank has another gradient."""

    def reduce(self: PowerSGD, flat: Tensor) -> Any:
        sums, self._sum = self._sum, lambda m: sums(m.clone() if m is self._right else m)
        yield from real(self, flat)
        del self._sum

    real = PowerSGD.reduce
    return mock.patch.object(PowerSGD, "reduce", reduce)


def largest_with_sign() -> Any:
    """The largest values, not the largest magnitudes."""
    return mock.patch.object(Tensor, "abs", lambda self: self)


FAULTS: dict[str, Any] = {
    "feedback_dropped": feedback_dropped,
    "not_orthonormal": not_orthonormal,
    "cold_start": cold_start,
    "own_right_factors": own_right_factors,
    "largest_with_sign": largest_with_sign,
}


# Training with compressed gradients.

TEXT_MODEL = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.08,
}  # fmt: skip
LENGTH = 48


@cache
def text() -> Tensor:
    """The bytes of this repository's licence: prose that nobody edits."""
    return torch.tensor([b for b in (ROOT / "LICENSE").read_bytes() if b < 128])


def text_batch(step: int, rank: int, ranks: int) -> Batch:
    """This rank's share of 16 pieces of text, drawn by step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text()) - LENGTH - 1, (16,), generator=generator)
    each = 16 // ranks
    rows = [text()[s : s + LENGTH + 1] for s in starts[rank * each : (rank + 1) * each].tolist()]
    tokens = torch.stack(rows)
    positions = torch.arange(LENGTH).expand(each, -1).contiguous()
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)


def learn(
    layout: str,
    chosen: CommunicationSection,
    steps: int,
    fault: str | None = None,
    lr: float = 5e-3,
) -> list[float]:
    """Losses on real text."""
    with FAULTS[fault]() if fault else nullcontext():
        run = cases.Run(layout, TEXT_MODEL, communication=chosen)
        return [run.step([text_batch(step, run.rank, run.ranks)], lr).loss for step in range(steps)]


def resumed(layout: str, chosen: CommunicationSection, carry: bool = True) -> dict[str, Any]:
    """Four steps at once, and as two, everything built anew from what is saved, and two."""
    straight, first, second = (cases.Run(layout, communication=chosen) for _ in range(3))
    rows = straight.steps(0, 4)
    first.steps(0, 2)
    for ours, theirs in (
        (second.axis.masters(), first.axis.masters()),
        (second.optimizer.state_tensors(), first.optimizer.state_tensors()),
    ):
        for name, part in ours.items():
            part.values.copy_(theirs[name].values)
    if carry:
        for name, tensor in second.axis.carried().items():
            tensor.copy_(first.axis.carried()[name])
    second.optimizer.load_scalars(first.optimizer.scalars())
    second.axis.publish()
    return {
        "rows": (rows[2:], second.steps(2, 4)),
        "state": (straight.state(), second.state()),
        "carried": (straight.axis.carried(), second.axis.carried()),
    }
