"""Putting the experts of a decoder on the ranks of the expert axis."""

from __future__ import annotations

# B batch, S places of a whole sequence, L of them here, K chosen experts, X experts
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from fivefold.axes.ep.dispatch import AllToAllDispatch
from fivefold.axes.part import Slice
from fivefold.model.dispatch import ExpertDispatcher
from fivefold.model.moe import GatherChoices, MixtureOfExperts

MakeDispatcher = Callable[[dist.ProcessGroup, int], ExpertDispatcher]


def divide_experts(
    decoder: nn.Module, group: dist.ProcessGroup, make: MakeDispatcher = AllToAllDispatch
) -> dict[str, Slice]:
    """Keep this rank's experts alone, in place, and send tokens to the others.

    Works on values and on the meta device alike. Gives the place in the whole of each parameter
    that was cut. Raises LayoutError where the ranks of `group` do not divide the experts.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    slices = {}
    for name, mixture in _mixtures(decoder):
        mixture.dispatcher = make(group, mixture.moe.experts)
        each = mixture.moe.experts // ranks
        for leaf, whole in list(mixture.experts.named_parameters()):
            slice = Slice.of(whole).narrow(0, rank * each, each)
            setattr(mixture.experts, leaf, nn.Parameter(slice.cut(whole.detach()).clone()))
            slices[f"{name}.experts.{leaf}"] = slice
    return slices


def share_sequences(
    decoder: nn.Module, group: dist.ProcessGroup, places: Callable[[int], Tensor]
) -> None:
    """Tell mixtures that the ranks of `group` hold parts of the same sequences.

    Side losses then look at the load of whole sequences, and a capacity at whole micro-batches.
    places: for L, where in the sequence each rank's L tokens stand: int64 [ranks, L]. All ranks
    have equally many; padding has places too, behind the rest.
    """
    for _, mixture in _mixtures(decoder):
        mixture.sequence_sum = sequence_sum(group)
        mixture.gather_choices = gather_choices(group, places)


def sequence_sum(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """A sum over the ranks of `group`; not differentiable, as counts need not be."""

    def over_ranks(x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    return over_ranks


def gather_choices(group: dist.ProcessGroup, places: Callable[[int], Tensor]) -> GatherChoices:
    """Choices [B,L,K] to those of all ranks [B,S,K] in the order of places, and [L] which of them
    are this rank's."""
    rank = dist.get_rank(group)

    def gather(choice: Tensor) -> tuple[Tensor, Tensor]:
        everyone = functional.wait_tensor(
            functional.all_gather_tensor(choice.contiguous(), 1, group)
        )
        stand = places(choice.shape[1]).to(choice.device)
        order = stand.flatten().argsort()
        return everyone[:, order], torch.searchsorted(stand.flatten()[order], stand[rank])

    return gather


def _mixtures(decoder: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    for name, module in decoder.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module
