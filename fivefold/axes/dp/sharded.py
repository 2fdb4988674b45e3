"""ZeRO-3: parameters, gradients and optimizer state divided, by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fivefold.axes.dp.groups import Groups, dense_groups, expert_groups
from fivefold.axes.dp.host import HostGradients, host_copy
from fivefold.axes.dp.materialize import materialize
from fivefold.axes.dp.protocol import Cut, decoder_name, is_expert
from fivefold.axes.dp.sums import add_parts
from fivefold.axes.mesh import Mesh
from fivefold.axes.part import Part
from fivefold.core.layout import Layout


@dataclass(frozen=True)
class Units:
    """What is gathered at a time: experts, which have data ranks of their own, then blocks, then
    what is left of each stage."""

    experts: tuple[nn.Module, ...]
    blocks: tuple[nn.Module, ...]
    stages: tuple[nn.Module, ...]
    model_has_experts: bool
    """Somewhere, though maybe not in these stages."""


class ShardedAxis:
    """Each block, and its stage for what is left, gathers its parameters when it runs."""

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        cut: Cut,
        *,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ) -> None:
        master = torch.promote_types(dtype, torch.float32)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(master)
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=wire_dtype,
            cast_forward_inputs=False,  # rotary tables stay fp32
        )
        offload: OffloadPolicy = OffloadPolicy()
        if layout.offload == "parameters":
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        # Making a mesh takes all ranks, also those of stages that have no experts.
        where = dict.fromkeys((*units.blocks, *units.stages), mesh.state_mesh)
        if units.model_has_experts:
            sparse = mesh.expert_state_mesh
            where |= dict.fromkeys(units.experts, sparse)
        for part in (*units.experts, *units.blocks, *units.stages):
            fully_shard(part, mesh=where[part], mp_policy=policy, offload_policy=offload)
        materialize(module, torch.device("cpu") if layout.offload == "parameters" else device)
        self.module = module
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # The loss is divided by the global number of targets: gradients add up as they are.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        self._cut = cut
        self._parameters = {decoder_name(n): p for n, p in module.named_parameters()}
        self._dense, self._expert = dense_groups(mesh), expert_groups(mesh)
        self._host = HostGradients() if layout.offload == "optimizer" else None
        self._masters = {name: self._master(name, p) for name, p in self._parameters.items()}
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> dict[str, Part]:
        """The sharded parameters themselves, or host copies under offload=optimizer."""
        return dict(self._masters)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shard of each gradient."""
        return self._gradients

    def begin(self, last: bool, times: Mapping[str, int] | None = None) -> None:
        """Nothing: every micro-batch reduces, since whole gradients would not fit."""

    def reduce(self) -> None:
        """FSDP waited at the end of backward; lay hold of the gradients."""
        found = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
        add_parts(found, self._cut.sums)
        self._gradients = self._host.fetch(found) if self._host else found

    @torch.no_grad()
    def publish(self) -> None:
        """Refresh what the next gathering reads, where that is not the masters themselves."""
        if self._host:
            for name, parameter in self._parameters.items():
                _local(parameter).copy_(self._masters[name].values, non_blocking=True)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._gradients = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def carried(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def _master(self, name: str, parameter: nn.Parameter) -> Part:
        groups: Groups = self._expert if is_expert(name) else self._dense
        part = Part.of(parameter)  # its place in what the other axes left
        cut = self._cut.slices[name]
        slice = replace(
            cut.copied(groups.copy, groups.copies),
            offsets=tuple(a + b for a, b in zip(cut.offsets, part.slice.offsets, strict=True)),
            sizes=part.slice.sizes,
        )
        values = host_copy(part.values, part.dtype) if self._host else part.values
        return Part(values, slice)


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's shard; zeros for a parameter that was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)
