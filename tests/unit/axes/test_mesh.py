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

from fivefold.axes.mesh import check_layout, check_rows, data_group, group_of
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2", "tp=2: this axis is not built yet"),
        ("pp=4", "pp=4: this axis is not built yet"),
        ("cp=2", "cp=2: this axis is not built yet"),
        ("ep=2", "ep=2: this axis is not built yet"),
        ("dp_shard=2,zero=2,offload=parameters", "zero=2 keeps whole parameters"),
        ("zero=1,offload=parameters", "zero=1 keeps whole parameters"),
    ],
)
def test_what_this_version_does_not_run(text: str, message: str) -> None:
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


def test_one_rank_has_no_groups() -> None:
    assert data_group(None) is None
    assert group_of(None, "dp_shard") is None


def test_a_process_alone_gets_a_mesh_without_opening_a_port() -> None:
    program = (
        "import torch.distributed as d; from fivefold.axes.mesh import alone_mesh, group_of;"
        "m = alone_mesh('cpu'); assert m.size() == 1 and group_of(m, 'dp_shard') is None;"
        "alone_mesh('cpu'); print(m.mesh_dim_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "('dp_replicate', 'dp_shard')", done.stderr
