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
from torch.distributed.tensor import DTensor

from fivefold.axes.dp.protocol import decoder_name
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

    def masters(self) -> dict[str, Tensor]:
        """The sharded parameters themselves, fp32 DTensors."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shard of each gradient; zeros for a parameter that got none."""
        return {name: self._gradient(parameter) for name, parameter in self._parameters.items()}

    def begin(self, last: bool) -> None:
        """Nothing: every micro-batch reduces, since whole gradients would not fit."""

    def reduce(self) -> None:
        """FSDP waits at the end of backward."""

    def publish(self) -> None:
        """Nothing: the next gathering reads the masters."""

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over all data ranks."""
        return all_reduced(value, self._data)

    def sum_shards(self, value: Tensor) -> Tensor:
        """`value` summed over the ranks that divide the parameters."""
        return all_reduced(value, self._shard)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        assert isinstance(parameter.grad, DTensor)
        return parameter.grad.to_local()
