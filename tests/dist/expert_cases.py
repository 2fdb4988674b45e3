"""Experts divided over ranks against all experts on each rank, as functions that workers call."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.axes.ep import collectives
from fivefold.axes.ep import dispatch as ep
from fivefold.axes.ep.deep_ep import DeepEPDispatch
from fivefold.axes.ep.dispatch import AllToAllDispatch
from fivefold.axes.ep.divide import divide_experts, share_sequences
from fivefold.core.config import MoESection
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.balance import configure
from fivefold.model.decoder import Decoder
from fivefold.model.dispatch import DROPPED, LocalDispatch
from fivefold.model.experts import Experts
from fivefold.model.families import parse_config
from fivefold.model.moe import MixtureOfExperts
from tests.dist import deep_ep_stand_in

EXPERTS, TOP_K, HIDDEN = 8, 3, 12
CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3, "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": EXPERTS, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 5,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def tokens_of(rank: int, kind: str) -> int:
    return 0 if kind == "idle" and rank == 0 else 7 + 3 * rank


def choices(tokens: int, kind: str, generator: torch.Generator) -> Tensor:
    """[N,K]: any, all on the first experts, or with some dropped."""
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "crowded":
        scores[:, :TOP_K] += 1.0
    choice = scores.topk(TOP_K).indices
    if kind == "dropped":
        choice[torch.rand(choice.shape, generator=generator) < 0.4] = DROPPED
    return choice


def experts_of(whole: Experts, rank: int, ranks: int) -> Experts:
    """Those of one rank, as parameters of their own."""
    part = Experts(parse_config(CONFIG), parse_config(CONFIG).moe)  # type: ignore[arg-type]
    for name in [n for n, _ in part.named_parameters()]:
        value = getattr(whole, name).detach().chunk(ranks)[rank].clone()
        setattr(part, name, torch.nn.Parameter(value))
    return part


def errors(kind: str, fault: str | None = None, deep: bool = False) -> dict[str, float]:
    """The largest differences of outputs and of every kind of gradient, in fp64.

    deep: through DeepEP's dispatcher over a stand-in for its library.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = parse_config(CONFIG)
    assert config.moe is not None
    torch.manual_seed(0)
    whole = Experts(config, config.moe).double()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    part = experts_of(whole, rank, ranks)
    generator = torch.Generator().manual_seed(rank)
    tokens = tokens_of(rank, kind)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    choice = choices(tokens, kind, generator)
    weight = torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)
    slope = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    group = dist.group.WORLD
    assert group is not None
    results = []
    for dispatch, run in (
        (LocalDispatch(EXPERTS), whole),
        (deep_dispatch(group) if deep else AllToAllDispatch(group, EXPERTS), part),
    ):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with planted(fault) if run is part else nullcontext():
            output = dispatch(inputs[0], choice, inputs[1], run, dropless=kind != "dropped")
            (output * slope).sum().backward()
        results.append((output, *(x.grad for x in inputs)))
    found = {
        name: distance(ours, theirs)
        for name, ours, theirs in zip(("output", "hidden", "weight"), *results[::-1], strict=True)
    }
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        found[name] = distance(getattr(part, name).grad, parameter.grad.chunk(ranks)[rank])
    return found


def deep_dispatch(group: dist.ProcessGroup) -> DeepEPDispatch:
    with mock.patch.dict(sys.modules, {"deep_ep": deep_ep_stand_in}):
        return DeepEPDispatch(group, EXPERTS)


def refuses_without_the_library() -> str:
    try:
        DeepEPDispatch(dist.group.WORLD, EXPERTS)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def distance(found: Tensor | None, expected: Tensor | None) -> float:
    assert expected is not None
    if found is None:
        return float("inf")
    return float((found - expected).abs().max()) if found.numel() else 0.0


def model_errors(recompute: bool) -> dict[str, float]:
    """A whole decoder: each rank's tokens through experts of all ranks, and all through one's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (ranks, 9), generator=generator)
    grads, loads = [], []
    for divided in (False, True):
        decoder = Decoder(parse_config(CONFIG), dtype=torch.float64)
        decoder.initialize(0)
        mixtures = [m for m in decoder.modules() if isinstance(m, MixtureOfExperts)]
        if divided:
            slices = divide_experts(decoder, group)
            assert slices.keys() == {n for n, _ in decoder.named_parameters() if ".experts." in n}
            assert {s.offsets[0] for s in slices.values()} == {rank * EXPERTS // ranks}
        for block in decoder.layers if recompute else ():
            plain = block.forward
            block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
        mine = tokens[rank : rank + 1] if divided else tokens
        places = torch.arange(mine.shape[1]).expand_as(mine)
        decoder.logits(decoder(mine, places, CausalAttention())).square().sum().backward()
        grads.append({n: p.grad for n, p in decoder.named_parameters()})
        loads.append(sum(m.load.total(torch.device("cpu")) for m in mixtures))
    dist.all_reduce(loads[1])  # type: ignore[arg-type]
    found = {"load": distance(loads[1], loads[0])}  # type: ignore[arg-type]
    for name, expected in grads[0].items():
        value = grads[1][name]
        assert value is not None and expected is not None
        if ".experts." in name:
            expected = expected.chunk(ranks)[rank]
        else:
            dist.all_reduce(value)
        found[name] = distance(value, expected) / float(expected.abs().max() + 1e-3)
    return found


def refuses_experts_that_do_not_divide() -> str:
    try:
        AllToAllDispatch(dist.group.WORLD, 7)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def planted(fault: str | None) -> AbstractContextManager[Any]:
    """A known mistake of expert parallelism."""
    if fault is None:
        return nullcontext()
    spread, all_to_all = ep.spread, collectives._all_to_all
    patches: dict[str, tuple[Any, str, Any]] = {
        # Gradients stop at the network.
        "no way back": (ep, "exchange", lambda rows, *a: collectives._all_to_all(rows.detach(), *a)),
        # Rows of one expert come from several ranks, and are not brought together.
        "not regrouped": (
            ep, "spread", lambda x, order, n: spread(x, order, n) if n > 1 else x
        ),
        # Answers go back in the order of experts and not in that of ranks.
        "not put apart": (ep, "spread", _first_only(spread)),
        # Gradients of experts divided by the number of ranks.
        "averaged": (
            collectives, "_all_to_all",
            lambda rows, sent, received, group: all_to_all(rows, sent, received, group)
            / (dist.get_world_size() if torch._C._current_graph_task_id() != -1 else 1),
        ),
    }  # fmt: skip
    return mock.patch.object(*patches[fault])


def _first_only(spread: Any) -> Any:
    calls = []

    def once(x: Tensor, order: Tensor, copies: int) -> Tensor:
        calls.append(copies)
        return spread(x, order, copies) if len(calls) < 3 else x

    return once


def sequence_errors(section: dict[str, Any], zigzag: bool, shared: bool = True) -> dict[str, float]:
    """One mixture: sequences divided over all ranks against whole ones, side losses alone too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    length, here = 4 * ranks, 4
    chunks = torch.arange(length).chunk(2 * ranks)
    if zigzag:
        pairs = [torch.cat((chunks[r], chunks[2 * ranks - 1 - r])) for r in range(ranks)]
    else:
        pairs = [torch.cat(chunks[2 * r : 2 * r + 2]) for r in range(ranks)]
    places = torch.stack(pairs)
    hidden = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(4)).double()
    results = []
    for divided in (False, True):
        decoder = Decoder(parse_config({**CONFIG, "num_hidden_layers": 2}), dtype=torch.float64)
        decoder.initialize(0)
        (mixture,) = (m for m in decoder.modules() if isinstance(m, MixtureOfExperts))
        balance = configure(decoder, MoESection(**section))
        balance.scale = 0.5
        if divided:
            divide_experts(decoder, group)
            if shared:
                share_sequences(decoder, group, lambda count: places)
        mine = hidden[:, places[rank]] if divided else hidden
        out = mixture(mine)
        (out.square().sum() * 0.1).backward()
        balance.update(_summed if divided else torch.clone)
        (told,) = balance.statistics().values()
        assert mixture.router.weight.grad is not None
        results.append((out, mixture.router.weight.grad, told))
    (whole, expected, load), (part, grad, told) = results
    assert part.shape[1] == here
    return {
        "output": distance(part, whole[:, places[rank]]),
        "router": distance(_summed(grad), expected),
        "load": float(told != load),
        "dropped": float(load["dropped"]),  # type: ignore[arg-type]
    }


def _summed(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def bytes_sent() -> tuple[int, int]:
    """(counted, by the formula) for one pass there and back, of this rank's own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    config = parse_config(CONFIG)
    assert config.moe is not None
    part = experts_of(Experts(config, config.moe).double(), rank, ranks)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens_of(rank, "any"), HIDDEN, generator=generator).double()
    choice = choices(len(hidden), "any", generator)
    counted, plain = [], collectives._all_to_all

    def counting(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        away = sum(sent) - sent[rank]
        counted.append(away * rows.shape[1] * rows.element_size())
        return plain(rows, sent, received, group)

    with mock.patch.object(collectives, "_all_to_all", counting):
        weight = torch.ones(choice.shape, dtype=torch.float64)
        out = AllToAllDispatch(group, EXPERTS)(hidden.requires_grad_(), choice, weight, part)
        out.sum().backward()
    each = EXPERTS // ranks
    leaving = int((choice // each != rank).sum())
    arriving = torch.tensor([0] * ranks)
    owners = torch.stack([((choice // each) == r).sum() for r in range(ranks)])
    dist.all_to_all_single(arriving, owners)
    arriving[rank] = 0
    # There and back, and their gradients: own rows twice, those of others twice.
    return sum(counted), 2 * (leaving + int(arriving.sum())) * HIDDEN * 8
