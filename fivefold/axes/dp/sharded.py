"""ZeRO-3: parameters, gradients and optimizer state divided, by torch's FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fivefold.axes.dp.host import HostGradients, host_copy
from fivefold.axes.dp.protocol import decoder_name
from fivefold.axes.dp.rows import like, local
from fivefold.axes.mesh import all_reduced, data_group, group_of, shard_mesh
from fivefold.core.layout import Layout


class ShardedAxis:
    """Each block, and the root for what is left, gathers its parameters when it runs."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[nn.Module],
        *,
        layout: Layout,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=wire_dtype,
            cast_forward_inputs=False,  # rotary tables stay fp32
        )
        offload: OffloadPolicy = OffloadPolicy()
        if layout.offload == "parameters":
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        for part in (*blocks, module):
            fully_shard(part, mesh=shard_mesh(mesh), mp_policy=policy, offload_policy=offload)
        self.module = module
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # The loss is divided by the global number of targets: gradients add up as they are.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        self._parameters = {decoder_name(n): p for n, p in module.named_parameters()}
        self._data, self._shard = data_group(mesh), group_of(mesh, "dp_shard")
        self._host = HostGradients() if layout.offload == "optimizer" else None
        self._masters = {name: self._master(p) for name, p in self._parameters.items()}
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> dict[str, Tensor]:
        """fp32 DTensors: the sharded parameters themselves, or host copies under offload=optimizer."""
        return dict(self._masters)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shard of each gradient."""
        return self._gradients

    def begin(self, last: bool) -> None:
        """Nothing: every micro-batch reduces, since whole gradients would not fit."""

    def reduce(self) -> None:
        """FSDP waited at the end of backward; lay hold of the gradients."""
        found = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
        self._gradients = self._host.fetch(found) if self._host else found

    @torch.no_grad()
    def publish(self) -> None:
        """Refresh what the next gathering reads, where that is not the masters themselves."""
        if self._host:
            for name, parameter in self._parameters.items():
                local(parameter).copy_(local(self._masters[name]), non_blocking=True)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._gradients = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over all data ranks."""
        return all_reduced(value, self._data)

    def sum_shards(self, value: Tensor) -> Tensor:
        """`value` summed over the ranks that divide the parameters."""
        return all_reduced(value, self._shard)

    def _master(self, parameter: nn.Parameter) -> Tensor:
        value = parameter.detach()
        return like(host_copy(local(value)), value) if self._host else value


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's shard; zeros for a parameter that was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
