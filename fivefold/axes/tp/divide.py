"""Cutting a decoder's parameters for one rank of the tensor axis, and the communication around."""

from __future__ import annotations

# B batch, S sequence, D hidden, T tensor-parallel ranks
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.part import Slice
from fivefold.axes.tp.collectives import copy_in, gather_in, scatter_out, sum_out
from fivefold.axes.tp.cross_entropy import vocabulary_cross_entropy
from fivefold.axes.tp.embedding import VocabularyEmbedding
from fivefold.axes.tp.plan import ADDED_AFTER, DIVIDED_MODULES, Split, rule, share
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.feed_forward import FeedForward
from fivefold.model.projection import Projection


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place on the axis.

    kv_group: ranks that hold the same key/value heads, where there are fewer heads than ranks.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    sequence_parallel: bool
    kv_group: dist.ProcessGroup | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a divided module: whole hidden states [B,S,D] on every rank."""
        return (gather_in if self.sequence_parallel else copy_in)(hidden, self.group)

    def leave(self, partial_sums: Tensor) -> Tensor:
        """Out of it: partial sums [B,S,D] to sums, [B,S/T,D] with sequence parallelism."""
        return (scatter_out if self.sequence_parallel else sum_out)(partial_sums, self.group)

    def head(self, slices: Mapping[str, Slice]) -> Callable[..., Tensor]:
        """The loss over a head whose rows are divided as `slices` says."""
        rows = slices["head.weight" if "head.weight" in slices else "embedding.weight"]
        return partial(self._cross_entropy, start=rows.offsets[0])

    def _cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, start: int, **options: Any
    ) -> Tensor:
        """Loss SUM of hidden states as blocks leave them; `start` is the first row of `weight`."""
        whole = self.enter(hidden)
        return vocabulary_cross_entropy(
            whole.flatten(0, 1), weight, labels.flatten(), start=start, group=self.group, **options
        )


class RowProjection(Projection):
    """A projection that has some of the inputs: its bias belongs to the sum, not to each part."""

    @property
    def added_bias(self) -> None:
        """None: it is added after the sum."""
        return None


@dataclass
class Divided:
    """What became of the parameters.

    slices: their place in the whole. sums: the groups over which a gradient is still to be
    added, because each rank of the group computes a part of it.
    """

    slices: dict[str, Slice] = field(default_factory=dict)
    sums: list[tuple[str, dist.ProcessGroup]] = field(default_factory=list)


def divide(decoder: Decoder, axis: TensorAxis) -> Divided:
    """Cut the parameters of `decoder` in place and put the communication around its modules.

    Works on values and on the meta device alike. Experts are left to the expert axis.
    """
    result = Divided()
    for name, parameter in list(decoder.named_parameters()):
        if ".experts." in name:
            result.slices[name] = Slice.of(parameter)
            continue
        owner, _, leaf = name.rpartition(".")
        split = rule(name)
        module = decoder.get_submodule(owner)
        if split is None:
            result.slices[name] = Slice.of(parameter).copied(axis.rank, axis.ranks)
            if axis.sequence_parallel or _is_inside(name):  # others see all tokens and all outputs
                result.sums.append((name, axis.group))
            continue
        slice = _slice(parameter, split, decoder.config, axis)
        if axis.kv_group is not None and split.unit == "kv_head":
            result.sums.append((name, axis.kv_group))
        result.slices[name] = slice
        cut = nn.Parameter(replace(slice, copies=1).cut(parameter.detach()).clone())
        setattr(module, leaf, cut)
    _put_communication(decoder, axis, result.slices)
    return result


def _slice(parameter: Tensor, split: Split, config: ModelConfig, axis: TensorAxis) -> Slice:
    start, size = share(parameter.shape[split.dim], split, config, axis.rank, axis.ranks)
    slice = Slice.of(parameter).narrow(split.dim, start, size)
    if split.unit == "kv_head" and axis.ranks > config.num_kv_heads:
        copies = axis.ranks // config.num_kv_heads
        slice = slice.copied(axis.rank % copies, copies)
    return slice


def _is_inside(name: str) -> bool:
    """Whether an undivided parameter works inside a divided module: on some of the heads, or for
    outputs that go on into divided ones."""
    inside = name.split(".")[2:]
    if ".".join(inside) in ADDED_AFTER:
        return False
    return len(inside) > 1 and inside[0] in ("attention", "feed_forward")


def _put_communication(decoder: Decoder, axis: TensorAxis, slices: dict[str, Slice]) -> None:
    if decoder.embedding is not None:
        start = slices["embedding.weight"].offsets[0]
        decoder.embedding = VocabularyEmbedding(decoder.embedding.weight.detach(), start)
        decoder.embedding.register_forward_hook(_leave(axis))
    for layer in decoder.layers:
        for name in DIVIDED_MODULES:
            module = _submodule(layer, name)
            if module is None:
                continue
            last = module.get_submodule("output" if name == "attention" else "down")
            assert isinstance(last, Projection)
            last.__class__ = RowProjection
            module.register_forward_pre_hook(_enter(axis))
            module.register_forward_hook(_leave(axis, last))


def _submodule(layer: nn.Module, name: str) -> nn.Module | None:
    module: Any = layer
    for part in name.split("."):
        module = getattr(module, part, None)
    # Routed experts take tokens as they are: a rank routes those of its own sequence shard.
    return module if name == "attention" or isinstance(module, FeedForward) else None


def _enter(axis: TensorAxis) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (axis.enter(args[0]), *args[1:])

    return hook


def _leave(axis: TensorAxis, last: Projection | None = None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        whole = axis.leave(output)
        bias = None if last is None else last.bias
        return whole if bias is None else whole + bias

    return hook
