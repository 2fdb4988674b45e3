"""Attention and whole decoders on divided rows against the same on whole rows, for workers to call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.axes.cp.axis import ContextAxis
from fivefold.axes.cp.groups import context_groups
from fivefold.axes.cp.split import ContextSplit, places_of
from fivefold.axes.recompute import recompute_blocks
from fivefold.kernels.attention import attention_reference
from fivefold.model.attention_backend import (
    AttentionBackend,
    CausalAttention,
    PackedAttention,
    causal_mask,
)
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from tests.dist import context_faults

SMALL = 0.1  # in a window of one token, gradients of scores are zeros; others are about 1


@dataclass(frozen=True)
class Case:
    ulysses: int = 1
    kind: str = "ring"
    length: int = 48
    documents: tuple[tuple[int, ...], ...] = ()  # lengths in each row; what is left is padding
    window: int | None = None
    softcap: float | None = None
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    multiple: int | None = None
    dtype: str = "float64"
    seed: int = 0
    fault: str = ""
    batch: int = 2
    scale: float = field(default=0.6)


def context_axis(ulysses: int, kind: str, multiple: int | None = None) -> ContextAxis:
    split = ContextSplit(dist.get_world_size(), dist.get_rank(), ulysses, multiple)
    groups = context_groups([list(range(split.cp))], ulysses)
    return ContextAxis(split, *groups, kind)  # type: ignore[arg-type]


def document_rows(lengths: tuple[tuple[int, ...], ...], length: int) -> Tensor | None:
    """[B,S], the document of every token."""
    if not lengths:
        return None
    rows = torch.full((len(lengths), length), -1)
    for row, of_row in zip(rows, lengths, strict=True):
        numbers = torch.arange(len(of_row)).repeat_interleave(torch.tensor(of_row))[:length]
        row[: len(numbers)] = numbers
    return rows


def compare(case: Case) -> dict[str, float]:
    """Largest difference to whole rows in fp64, of the result and the three gradients, over ranks.

    Relative to the largest value of the whole tensor, or to SMALL.
    """
    batch = len(case.documents) or case.batch
    axis = context_axis(case.ulysses, case.kind, case.multiple)
    length = axis.context_split.padded(case.length)
    generator = torch.Generator().manual_seed(case.seed)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(batch, length, heads, dim, generator=generator, dtype=torch.float64)

    whole = [
        draw(case.heads, case.key_dim),
        draw(case.kv_heads, case.key_dim),
        draw(case.kv_heads, case.value_dim),
    ]
    grad = draw(case.heads, case.value_dim)
    grad[:, case.length :] = 0.0  # padding has no label
    documents = document_rows(case.documents, case.length)
    dtype = getattr(torch, case.dtype)
    whole, grad = [x.to(dtype).double() for x in whole], grad.to(dtype).double()
    wanted = _whole(case, whole, grad, documents)
    with context_faults.planted(case.fault):
        found, places = _divided(case, axis, whole, grad, documents, dtype)
    real = places < case.length
    errors = {}
    for name, ours, theirs in zip(("result", "query", "key", "value"), found, wanted, strict=True):
        difference = ours.double()[:, real] - theirs[:, places[real]]
        errors[name] = float(difference.abs().max() / theirs.abs().max().clamp_min(SMALL))
    names = list(errors)
    most = torch.tensor([errors[name] for name in names], dtype=torch.float64)
    dist.all_reduce(most.nan_to_num_(nan=float("inf")), dist.ReduceOp.MAX)
    return dict(zip(names, most.tolist(), strict=True))


def _whole(case: Case, whole: list[Tensor], grad: Tensor, documents: Tensor | None) -> list[Tensor]:
    leaves = [x[:, : case.length].clone().requires_grad_() for x in whole]
    places = torch.arange(case.length).unsqueeze(0)
    mask = causal_mask(places, places, case.window)
    if documents is not None:
        mask = mask & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
    result = attention_reference(
        *leaves, mask=mask, causal=False, scale=case.scale, softcap=case.softcap
    )
    result.backward(grad[:, : case.length])
    return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def _divided(
    case: Case,
    axis: ContextAxis,
    whole: list[Tensor],
    grad: Tensor,
    documents: Tensor | None,
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor]:
    split = axis.context_split
    tokens = torch.zeros(whole[0].shape[0], case.length, dtype=torch.int64)
    local = axis.split(tokens, tokens, tokens, documents)
    backend = axis.attention(local.documents, local.places, local.length)
    leaves = [split.cut(x).to(dtype).requires_grad_() for x in whole]
    result = backend(*leaves, layer=0, window=case.window, scale=case.scale, softcap=case.softcap)
    result.backward(split.cut(grad).to(dtype))
    places = places_of(split.runs(local.length, split.rank), torch.device("cpu"))
    return [result.detach(), *(leaf.grad for leaf in leaves)], places  # type: ignore[list-item]


CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip


def decoder_step(
    ulysses: int,
    kind: str,
    packed: bool,
    recompute: str = "none",
    fault: str = "",
    compile: bool = False,
) -> dict[str, float]:
    """Loss and gradients of a decoder on divided rows against whole rows, largest difference."""
    documents = document_rows(((11, 20, 8), (39,)) if packed else (), 39)
    tokens, labels, positions = _rows(documents)
    wanted = _loss_and_gradients(tokens, labels, positions, _plain(documents), "none", False)
    with context_faults.planted(fault):
        axis = context_axis(ulysses, kind)
        local = axis.split(tokens, labels, positions, documents)
        backend = axis.attention(local.documents, local.places, local.length)
        found = _loss_and_gradients(
            local.tokens, local.labels, local.positions, backend, recompute, True, compile
        )
    return {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in wanted.items()
    }


def _rows(documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions as the data gives them: every document on its own."""
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    tokens, following = tokens[:, :-1], tokens[:, 1:].clone()
    positions = torch.arange(39).expand(2, -1).clone()
    if documents is not None:
        ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
        following[ends | (documents == -1)] = -100
        for row, numbers in zip(positions, documents, strict=True):
            for number in numbers.unique():
                row[numbers == number] = torch.arange(int((numbers == number).sum()))
    following[0, :4] = -100
    return tokens, following, positions


def _plain(documents: Tensor | None) -> AttentionBackend:
    return CausalAttention() if documents is None else PackedAttention(documents)


def _loss_and_gradients(
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor,
    backend: AttentionBackend,
    recompute: Any,
    divided: bool,
    compile: bool = False,
) -> dict[str, Tensor]:
    decoder = Decoder(parse_config(CONFIG), dtype=torch.float64)
    decoder.initialize(0)
    parameters = dict(decoder.named_parameters())
    recompute_blocks(decoder.layers, recompute, 1)
    if compile:
        for block in decoder.layers:
            block.compile(backend="aot_eager")
    hidden = decoder(tokens, positions, backend)
    logits = decoder.logits(hidden).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    found = {name: parameter.grad for name, parameter in parameters.items()}
    answer = {"loss": loss.detach(), **{n: g for n, g in found.items() if g is not None}}
    if divided:
        for value in answer.values():
            dist.all_reduce(value)
    return answer


def bytes_sent(case: Case) -> tuple[int, int]:
    """Bytes that this rank sends to others in forward, and in backward."""
    axis = context_axis(case.ulysses, case.kind)
    tokens = torch.zeros(case.batch, case.length, dtype=torch.int64)
    local = axis.split(tokens, tokens, tokens, None)
    backend = axis.attention(None, local.places)
    shape = local.tokens.shape
    dtype = getattr(torch, case.dtype)
    dims = (
        (case.heads, case.key_dim),
        (case.kv_heads, case.key_dim),
        (case.kv_heads, case.value_dim),
    )
    leaves = [torch.randn(*shape, *dim).to(dtype).requires_grad_() for dim in dims]
    with _counted() as sent:
        result = backend(*leaves, layer=0, window=None, scale=1.0, softcap=None)
        forward = sum(sent)
        result.sum().backward()
    return forward, sum(sent) - forward


@contextmanager
def _counted() -> Iterator[list[int]]:
    sent: list[int] = []
    functional = torch.distributed._functional_collectives
    send, gather = dist.batch_isend_irecv, functional.all_gather_single
    scatter, exchange = functional.reduce_scatter_single, functional.all_to_all_single

    def counted_send(operations: list[Any]) -> Any:
        sent.extend(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return send(operations)

    def counted_gather(x: Tensor, dim: int, group: Any) -> Any:
        sent.append(x.nbytes * (dist.get_world_size(group) - 1))
        return gather(x, dim, group)

    def counted_scatter(x: Tensor, operation: str, dim: int, group: Any) -> Any:
        ways = dist.get_world_size(group)
        sent.append(x.nbytes * (ways - 1) // ways)
        return scatter(x, operation, dim, group)

    def counted_exchange(x: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Any:
        kept = leaving[dist.get_rank(group)]
        sent.append(x.nbytes * (sum(leaving) - kept) // sum(leaving))
        return exchange(x, arriving, leaving, group)

    with (
        mock.patch("torch.distributed.batch_isend_irecv", counted_send),
        mock.patch.object(functional, "all_gather_single", counted_gather),
        mock.patch.object(functional, "reduce_scatter_single", counted_scatter),
        mock.patch.object(functional, "all_to_all_single", counted_exchange),
    ):
        yield sent


def group_ranks(rows: list[list[int]], ulysses: int) -> list[list[int] | None]:
    """Who is in this rank's ring and Ulysses groups."""
    groups = context_groups(rows, ulysses)
    return [dist.get_process_group_ranks(group) if group else None for group in groups]
