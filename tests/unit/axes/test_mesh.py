"""Layouts that cannot run are refused with the number that is wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.axes.check import check_layout
from fivefold.axes.mesh import check_rows
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=2,dp_shard=2,zero=2", "zero=2 with pp=2 would save nothing"),
        ("pp=2,dp_shard=2,schedule=zbv", "schedule=zbv postpones weight gradients"),
        ("dp_shard=4,ep=3", "ep=3 does not divide the 4 ranks"),
        ("dp_shard=2,zero=2,offload=parameters", "zero=2 keeps whole parameters"),
        ("zero=1,offload=parameters", "zero=1 keeps whole parameters"),
    ],
)
def test_what_no_model_can_be_run_on(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        check_layout(Layout.parse(text))
    assert caught.value.mend


def test_a_rank_without_parameters() -> None:
    parameters = {"norm.weight": torch.zeros(8), "embedding.weight": torch.zeros(10, 8)}
    check_rows(Layout(dp_shard=5), parameters)
    # Ten rows over six ranks are two each for five of them; eight rows are two each for four.
    with pytest.raises(LayoutError, match=r"dp_shard=6 .* more than 5 \(embedding.weight, 10 rows"):
        check_rows(Layout(dp_shard=6), parameters)
    check_rows(Layout(dp_shard=10), parameters)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(rows=st.lists(st.integers(1, 30), min_size=1, max_size=3), ranks=st.integers(1, 30))
def test_it_is_refused_exactly_when_torch_leaves_a_rank_empty(rows: list[int], ranks: int) -> None:
    parameters: dict[str, Tensor] = {f"p{i}": torch.zeros(n) for i, n in enumerate(rows)}
    fits = any(len(p.chunk(ranks)) == ranks for p in parameters.values())
    if fits:
        check_rows(Layout(dp_shard=ranks), parameters)
    else:
        with pytest.raises(LayoutError, match=f"dp_shard={ranks} "):
            check_rows(Layout(dp_shard=ranks), parameters)


def test_a_process_alone_gets_a_mesh_without_opening_a_port() -> None:
    program = (
        "from fivefold.axes.mesh import STATE, alone_mesh; from fivefold.core.layout import Layout;"
        "m = alone_mesh(Layout(), 'cpu'); assert m.group(STATE) is None;"
        "alone_mesh(Layout(), 'cpu'); print(m.state_mesh.mesh_dim_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "('shard',)", done.stderr
