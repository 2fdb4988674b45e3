"""The operators on two ranks: modules under FSDP2, and operators over shards, as workers call them."""

from __future__ import annotations

# N tokens, D hidden, H query heads, K key/value heads, E head_dim, F width, V vocabulary, X experts
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import local_map

from fivefold.kernels import dispatch
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.flash_attention import flash_attention
from fivefold.kernels.gated import gated
from fivefold.kernels.grouped_linear import grouped_linear
from fivefold.kernels.linear import linear
from fivefold.kernels.log_probs import linear_log_probs
from fivefold.kernels.multiply import multiply
from fivefold.kernels.rms_norm import rms_norm, rms_norm_residual
from fivefold.kernels.rope import apply_rope
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.objective import Objective
from tests import operator_cases
from tests.dist.cases import CONFIG, UNTIED

ROWS, LENGTH = 4, 13
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WHOLE, ROWWISE, SUMMED = Replicate(), Shard(0), Partial()


@cache  # a mesh makes process groups, and the workers live long
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


# ---- FSDP2 ----


def losses(
    module: Objective, tokens: Tensor, labels: Tensor, each: Callable[[Tensor], None]
) -> list[Tensor]:
    """One loss a row of tokens [B,S], each with its own backward pass."""
    found = []
    positions = torch.arange(LENGTH)[None]
    for row in range(tokens.shape[0]):
        loss = module(tokens[row : row + 1], labels[row : row + 1], positions, None)
        each(loss)
        found.append(loss.detach())
    return found


def rows_of_tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(0, 128, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[1, 4:] = -100
    return tokens, labels


def decoder_under_fsdp(dtype: str, tied: bool, mixed: bool) -> dict[str, Any]:
    """Losses of this rank's rows and of the same rows by the unwrapped module, and both gradients.

    `mixed`: fp32 parameters that are gathered in `dtype`. Gradients are whole, of all rows.
    """
    tokens, labels = rows_of_tokens()
    half = ROWS // dist.get_world_size()
    mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    with dispatch.deterministic():
        plain = objective(tied, DTYPES[dtype])
        alone = losses(plain, tokens, labels, lambda loss: loss.backward())
        wrapped = objective(tied, torch.float32 if mixed else DTYPES[dtype])
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for part in (*wrapped.decoder.layers, wrapped):
            fully_shard(part, mesh=mesh(), mp_policy=policy)
            part.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
        together = losses(wrapped, tokens[mine], labels[mine], lambda loss: loss.backward())
    return {
        "losses": (together, alone[mine]),
        "gradients": (gradients(wrapped), gradients(plain)),
    }


def objective(tied: bool, dtype: torch.dtype) -> Objective:
    decoder = Decoder(parse_config(CONFIG if tied else UNTIED))
    decoder.initialize(0)
    return Objective(decoder.to(dtype), chunk=5)


def everything_under_fsdp(dtype: str) -> dict[str, Any]:
    """All operators in modules that are gathered one by one, on tokens of this rank's own."""
    seeds = range(dist.get_world_size())
    with dispatch.deterministic():
        plain = operator_cases.everything(DTYPES[dtype])
        alone = [plain(*operator_cases.inputs(DTYPES[dtype], seed)) for seed in seeds]
        torch.stack(alone).sum().backward()
        wrapped = operator_cases.everything(DTYPES[dtype])
        for part in (wrapped.attend, wrapped.feed, wrapped.judge, wrapped):
            fully_shard(
                part, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
            )
            part.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
        loss = wrapped(*operator_cases.inputs(DTYPES[dtype], dist.get_rank()))
        loss.backward()
    return {
        "losses": ([loss.detach()], [alone[dist.get_rank()].detach()]),
        "gradients": (gradients(wrapped), gradients(plain)),
    }


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole, in fp32."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).float()
        for name, p in module.named_parameters()
    }


# ---- shards ----


class Case(NamedTuple):
    """An operator, where its operands and results lie on the ranks, and what its operands are.

    Gradients of operands that every rank has whole are sums of each rank's part.
    """

    function: Callable[..., Any]
    operands: tuple[Tensor, ...]
    places: tuple[Placement, ...]
    results: tuple[Placement, ...]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


STARTS = torch.tensor([0, 5, 6, 16], dtype=torch.int32)
LABELS = torch.tensor([3, -100, 7, 0, 1, 36, -100, 2, 9, 9, 30, 31, 32, 4, 5, 6])


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return flash_attention(
        query, key, value, STARTS, STARTS, causal=True, scale=0.3, window=4, softcap=9.0
    )


def norm_with(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_residual(x, residual, weight, 1e-6, 1.0)


def cases() -> dict[str, Case]:
    """16 tokens of 24 numbers each."""
    x, weight, norm = normal(16, 24), normal(40, 24, seed=1), normal(24, seed=2)
    heads, angles = normal(2, 8, 4, 6, seed=3), normal(1, 8, 3, seed=4)
    head = normal(37, 24, seed=5)
    turn = (angles.cos(), angles.sin())
    return {
        "multiply": Case(
            multiply, (x, weight.mT, normal(40, seed=6)), (WHOLE, Shard(1), ROWWISE), (Shard(1),)
        ),
        "linear by columns": Case(
            linear, (x, weight, normal(40, seed=6)), (WHOLE, ROWWISE, ROWWISE), (Shard(1),)
        ),
        "linear by rows": Case(linear, (x, weight), (Shard(1), Shard(1)), (SUMMED,)),
        "grouped_linear": Case(
            grouped_linear, (x, normal(4, 10, 24, seed=7), torch.tensor([6, 2, 0, 8])),
            (ROWWISE, ROWWISE, ROWWISE), (ROWWISE,),
        ),
        "flash_attention": Case(
            attend, (normal(16, 4, 6, seed=1), normal(16, 2, 6, seed=2), normal(16, 2, 8, seed=3)),
            (Shard(1), Shard(1), Shard(1)), (Shard(1), ROWWISE),
        ),
        "linear_cross_entropy": Case(
            lambda *a: linear_cross_entropy(*a, chunk=3), (x, head, LABELS),
            (ROWWISE, WHOLE, ROWWISE), (SUMMED,),
        ),
        "linear_log_probs": Case(
            lambda *a: linear_log_probs(*a, chunk=3), (x, head, LABELS),
            (ROWWISE, WHOLE, ROWWISE), (ROWWISE, ROWWISE),
        ),
        "rms_norm": Case(lambda *a: rms_norm(*a, 1e-6), (x, norm), (ROWWISE, WHOLE), (ROWWISE,)),
        "rms_norm_residual": Case(
            norm_with, (x, normal(16, 24, seed=8), norm), (ROWWISE, ROWWISE, WHOLE),
            (ROWWISE, ROWWISE),
        ),
        "apply_rope": Case(apply_rope, (heads, *turn), (Shard(2), WHOLE, WHOLE), (Shard(2),)),
        "gated": Case(
            lambda *a: gated(*a, "gelu_tanh"), (x, normal(16, 24, seed=9)), (Shard(1), Shard(1)),
            (Shard(1),),
        ),
    }  # fmt: skip


NAMES = list(cases())


def on_shards(name: str, dtype: str) -> dict[str, Any]:
    """Results and gradients whole, by shards under `local_map` and by one call."""
    case = cases()[name]
    operands = tuple(in_format(name, x, i, DTYPES[dtype]) for i, x in enumerate(case.operands))
    trained = [x.is_floating_point() and x.dtype == DTYPES[dtype] for x in operands]
    trained = [yes and not (name == "apply_rope" and i) for i, yes in enumerate(trained)]
    with dispatch.deterministic():
        whole = [x.clone().requires_grad_(yes) for x, yes in zip(operands, trained, strict=True)]
        expected = tuple_of(case.function(*whole))
        slopes = [normal(*r.shape, seed=i).to(r.dtype) for i, r in enumerate(expected)]
        wanted = [x for x, yes in zip(whole, trained, strict=True) if yes]
        smooth = [i for i, r in enumerate(expected) if r.requires_grad]
        expected_grads = torch.autograd.grad(
            [expected[i] for i in smooth], wanted, [slopes[i] for i in smooth]
        )
        shards = [
            distribute_tensor(x, mesh(), [place]).requires_grad_(yes)
            for x, place, yes in zip(operands, case.places, trained, strict=True)
        ]
        several = len(case.results) > 1
        call = local_map(
            case.function,
            out_placements=tuple([place] for place in case.results)
            if several
            else [case.results[0]],
            in_placements=tuple([place] for place in case.places),
            in_grad_placements=tuple(
                [SUMMED if place == WHOLE else place] for place in case.places
            ),
            device_mesh=mesh(),
        )
        found = tuple_of(call(*shards))
        pieces = [
            distribute_tensor(slope, mesh(), [WHOLE if place == SUMMED else place])
            for slope, place in zip(slopes, case.results, strict=True)
        ]
        leaves = [x for x, yes in zip(shards, trained, strict=True) if yes]
        grads = torch.autograd.grad([found[i] for i in smooth], leaves, [pieces[i] for i in smooth])
    places = list(zip(case.places, trained, strict=True))
    return {
        "results": ([r.detach().full_tensor() for r in found], [r.detach() for r in expected]),
        "gradients": ([g.full_tensor() for g in grads], list(expected_grads)),
        "summed": (SUMMED in case.results, [p == WHOLE for p, yes in places if yes]),
    }


def in_format(name: str, x: Tensor, index: int, dtype: torch.dtype) -> Tensor:
    tables = name == "apply_rope" and index > 0  # stay in fp32
    return x.to(dtype) if x.is_floating_point() and not tables else x


def tuple_of(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def attention_of_a_shard_by_hand(dtype: str) -> tuple[list[Tensor], list[Tensor]]:
    """`to_local` and `from_local` around the decoder's own attention, heads divided."""
    shapes = ((2, 8, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6))
    operands = [normal(*s, seed=i).to(DTYPES[dtype]) for i, s in enumerate(shapes)]
    settings: dict[str, Any] = {"layer": 0, "window": 3, "scale": 0.4, "softcap": None}
    with dispatch.deterministic():
        whole = [x.clone().requires_grad_() for x in operands]
        expected = CausalAttention()(*whole, **settings)
        slope = normal(*expected.shape, seed=9).to(DTYPES[dtype])
        expected_grads = torch.autograd.grad(expected, whole, slope)
        shards = [distribute_tensor(x, mesh(), [Shard(2)]).requires_grad_() for x in operands]
        part = CausalAttention()(*(x.to_local() for x in shards), **settings)
        found = DTensor.from_local(part, mesh(), [Shard(2)])
        grads = torch.autograd.grad(found, shards, distribute_tensor(slope, mesh(), [Shard(2)]))
    return (
        [found.detach().full_tensor(), *(g.full_tensor() for g in grads)],
        [expected.detach(), *expected_grads],
    )
