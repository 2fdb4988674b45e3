"""Offloaded state is a copy in host memory, refreshed in place."""

from __future__ import annotations

import torch

from fivefold.axes.dp.host import HostGradients, host_copy


def test_a_copy_is_fp32_and_apart() -> None:
    value = torch.randn(3, 2, dtype=torch.bfloat16)
    copy = host_copy(value)
    assert copy.dtype == torch.float32 and copy.device.type == "cpu"
    assert torch.equal(copy, value.float())
    value.zero_()
    assert float(copy.abs().sum()) > 0


def test_gradients_come_into_the_same_buffers_every_step() -> None:
    host = HostGradients()
    first = host.fetch({"a": torch.ones(3), "b": torch.zeros(2)})
    second = host.fetch({"a": torch.full((3,), 2.0), "b": torch.ones(2)})
    assert first["a"].data_ptr() == second["a"].data_ptr()
    assert second["a"].tolist() == [2, 2, 2] and second["b"].tolist() == [1, 1]
