"""Tensor parallelism moves what the formula says, and nobody ever holds what it divides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.axes.tp.cross_entropy import vocabulary_cross_entropy
from fivefold.core.layout import Layout
from fivefold.kernels.cpu.library import KernelError
from fivefold.kernels.cross_entropy import linear_cross_entropy_reference
from tests.dist.cases import SEQUENCE, VOCABULARY, Run, batches
from tests.dist.harness import Workers
from tests.parity.lattice.cases import model_config

CHUNK = 16  # tokens of the loss at a time, see `Run`
KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
}


class Watch(TorchDispatchMode):
    """Collectives by kind, and the largest last dim of a floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.widest = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = operator.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            for start, kind in KINDS.items():
                self.collectives[kind] += name.startswith(start)
        result = operator(*args, **(kwargs or {}))
        # Buckets of gradients are flat.
        if isinstance(result, torch.Tensor) and result.ndim > 1 and result.is_floating_point():
            self.widest = max(self.widest, result.shape[-1])
        return result


def watched(layout: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Collectives of one micro-batch's forward and of its backward; the widest tensor."""
    run = Run(layout, model_config("dense"))
    batch = batches(0, 0, 1, 1)[0]
    run.axis.axis.begin(last=False)
    with Watch() as forward:
        loss = run.axis.module(batch.tokens, batch.labels, batch.positions, None)
    with Watch() as backward:
        loss.backward()
    widest = max(forward.widest, backward.widest)
    return dict(+forward.collectives), dict(+backward.collectives), widest


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_a_step_with_sequence_parallelism(
    workers: Callable[[int], Workers], ranks: int
) -> None:
    blocks, chunks = model_config("dense").num_layers, -(-SEQUENCE // CHUNK)
    for forward, backward, widest in workers(ranks).run(watched, f"tp={ranks}"):
        # In and out of attention and feed-forward, out of the embedding, into the head.
        both_ways = {"all_gather": 2 * blocks + 1, "reduce_scatter": 2 * blocks + 1}
        # The largest logit, then sums and targets.
        assert forward == both_ways | {"all_reduce": 2 * chunks}
        assert backward == both_ways
        assert widest <= max(-(-VOCABULARY // ranks), 8 * 8 // ranks, 32)  # never all logits


def test_collectives_of_a_step_without(workers: Callable[[int], Workers]) -> None:
    blocks, chunks = model_config("dense").num_layers, -(-SEQUENCE // CHUNK)
    for forward, backward, _ in workers(2).run(watched, "tp=2,sequence_parallel=false"):
        assert forward == {"all_reduce": 2 * blocks + 1 + 2 * chunks}
        assert backward == {"all_reduce": 2 * blocks + 1}


def held(layout: str) -> dict[str, int]:
    """Elements of each parameter on this rank."""
    run = Run(layout, model_config("tied"))
    return {name: part.values.numel() for name, part in run.axis.masters().items()}


def test_parameters_are_divided_as_the_plan_says(workers: Callable[[int], Workers]) -> None:
    """Four ranks, two key/value heads: each head is on two ranks."""
    config = model_config("tied")
    wide = config.head_dim * config.hidden_size
    found = workers(4).run(held, str(Layout(tp=4)))
    for rank, elements in enumerate(found):
        rows = len(torch.arange(VOCABULARY).chunk(4)[rank])
        assert elements["embedding.weight"] == rows * config.hidden_size
        assert elements["layers.0.attention.query.weight"] == config.num_heads // 4 * wide
        assert elements["layers.0.attention.key.weight"] == wide
        assert elements["layers.0.feed_forward.down.weight"] == 14 * config.hidden_size
        assert elements["layers.0.attention_norm.weight"] == config.hidden_size


def losses(dtype: torch.dtype, softcap: float | None, z_loss: float) -> list[float]:
    """Of a divided head beside the whole one: errors of loss and gradients, twice over one graph."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(19, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    labels = torch.randint(0, 50, (19,), generator=generator)
    labels[::4] = -100
    mine = weight.chunk(ranks)[rank].clone().requires_grad_()
    start = rank * weight.chunk(ranks)[0].shape[0]
    loss = vocabulary_cross_entropy(
        hidden, mine, labels, start=start, group=dist.group.WORLD, softcap=softcap, z_loss=z_loss,
        chunk=5,
    )  # fmt: skip
    once = torch.autograd.grad(1.7 * loss, (hidden, mine), retain_graph=True)
    again = torch.autograd.grad(1.7 * loss, (hidden, mine))
    whole = tuple(x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = linear_cross_entropy_reference(*whole, labels, softcap=softcap, z_loss=z_loss)
    expected = torch.autograd.grad(1.7 * exact, whole)
    of_hidden = once[0].double()
    dist.all_reduce(of_hidden)
    found = (loss.double(), exact), (of_hidden, expected[0]), (
        once[1].double(), expected[1][start : start + len(mine)],
    )  # fmt: skip
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in found]
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(once, again, strict=True))
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (4.0, 1e-2)])
def test_a_divided_head_has_the_whole_ones_loss_and_gradients(
    workers: Callable[[int], Workers], dtype: torch.dtype, softcap: float | None, z_loss: float
) -> None:
    allowed = 1e-5 if dtype == torch.float32 else 2**-6
    for loss, of_hidden, of_weight in workers(2).run(losses, dtype, softcap, z_loss):
        assert loss < 1e-5
        assert max(of_hidden, of_weight) < allowed


def poisoned() -> bool:
    """Whether a token without a target, whose state is no number, leaves loss and gradients alone."""
    hidden = torch.ones(3, 4)
    hidden[1] = float("nan")
    weight = torch.eye(4)[:2].requires_grad_()
    loss = vocabulary_cross_entropy(
        hidden.requires_grad_(), weight, torch.tensor([0, -100, 3]),
        start=2 * dist.get_rank(), group=dist.group.WORLD,
    )  # fmt: skip
    (of_hidden,) = torch.autograd.grad(loss, hidden)
    return bool(loss.isfinite() and of_hidden.isfinite().all() and not of_hidden[1].any())


def test_tokens_without_a_target_do_not_matter(workers: Callable[[int], Workers]) -> None:
    assert all(workers(2).run(poisoned))


def bad_heads() -> list[str]:
    found = []
    for shape, chunk in (((50, 23), 5), ((50, 24), -1)):
        try:
            vocabulary_cross_entropy(
                torch.ones(19, 24), torch.ones(shape), torch.zeros(19, dtype=torch.int64),
                start=0, group=dist.group.WORLD, chunk=chunk,
            )  # fmt: skip
        except KernelError as error:
            found.append(str(error))
    return found


def test_heads_that_do_not_fit_are_named(workers: Callable[[int], Workers]) -> None:
    for shape, chunk in workers(2).run(bad_heads):
        assert "[50, 23]" in shape and "at least one token, not -1" in chunk
