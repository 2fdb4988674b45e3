"""Sharded tensors are described as they are, and stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fivefold.axes.dp.rows import like, local, rows_as_dtensor
from fivefold.axes.mesh import alone_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield alone_mesh("cpu")
    dist.destroy_process_group()


def test_rows_share_memory_with_what_they_describe(mesh: DeviceMesh) -> None:
    whole = torch.randn(4, 3)
    found = rows_as_dtensor(whole, whole, mesh)
    assert found.placements == (Shard(0),)
    assert found.shape == whole.shape
    assert torch.equal(found.full_tensor(), whole)
    local(found).zero_()
    assert float(whole.abs().sum()) == 0


def test_offloaded_rows_stay_in_host_memory(mesh: DeviceMesh) -> None:
    """The mesh is of GPUs, the rows are not: DTensor.from_local would carry them over."""
    rows = torch.randn(4, 3)
    with mock.patch.object(DeviceMesh, "device_type", "cuda"):
        with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
            DTensor.from_local(rows, mesh["dp_shard"], (Shard(0),), run_check=False)
        found = rows_as_dtensor(rows, rows, mesh)
        assert local(found).data_ptr() == rows.data_ptr()
        moment = torch.zeros(4, 3)
        assert local(like(moment, found)).data_ptr() == moment.data_ptr()


def test_a_plain_tensor_is_described_by_itself() -> None:
    value = torch.zeros(3)
    assert like(value, torch.ones(3)) is value
    assert local(value).data_ptr() == value.data_ptr()
