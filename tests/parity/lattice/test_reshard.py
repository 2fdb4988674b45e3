"""A run goes on under other layouts, again and again, and follows the run that never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.core.layout import Layout
from tests.dist.harness import Workers
from tests.parity.lattice import cases, reshard

CHAINS = {
    "tied": ["tp=2,pp=2", "dp_shard=4,zero=3", "cp=2,dp_replicate=2,zero=2", "", "pp=2,zero=1"],
    "moe": ["tp=2,pp=2,ep=2", "dp_shard=4,zero=2", "dp_shard=2,cp=2,ep=2,zero=3", "", "tp=2"],
    "mla": ["pp=2,dp_shard=2,zero=1,schedule=zbv", "tp=2,ep=2", "", "dp_shard=2,tp=2,ep=4,zero=3"],
}


@pytest.mark.parametrize(
    "model", ["moe", *(pytest.param(model, marks=pytest.mark.slow) for model in ("tied", "mla"))]
)
def test_each_layout_goes_on_from_the_one_before(
    workers: Callable[[int], Workers], tmp_path: Path, model: str
) -> None:
    chain = CHAINS[model]
    straight = reshard.steps(str(tmp_path / "straight"), "", model, 0, len(chain))
    for number, layout in enumerate(chain):
        ranks = Layout.parse(layout).world_size
        found = workers(ranks).run(
            reshard.steps, str(tmp_path / "run"), layout, model, number, number + 1
        )[0]
        row = {"rows": straight["rows"][number : number + 1], "gradients": [], "state": {}}
        limits = cases.errors({**found, "state": {}}, row)
        assert limits["rows"] < 1e-10, (number, layout, limits)
    assert cases.errors({**found, "rows": []}, {**straight, "rows": []})["state"] < 1e-10
