from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.resolve import resolve
from fivefold.model.families import parse_config
from fivefold.plan.export.recipe import recipe
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import judge
from fivefold.plan.search.guess import parse_guess
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job

MODELS = {
    "llama-3.1-8b": "tp=2,dp=4,pp=2,zero=1,schedule=interleaved,virtual=4",
    "qwen3-8b": "dp=16,zero=3",
    "mixtral-8x7b": "dp=16,ep=8,zero=3",
    "deepseek-v3": "dp_replicate=2,dp_shard=8,ep=8,zero=3",
    "llama-2-13b": "cp=2,dp=8,ulysses=2,order=dp_replicate/dp_shard/pp/cp/tp",
}


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_is_the_strategy_and_the_model(model: str, tmp_path: Path) -> None:
    asked = job(model, "2x8xH100", 4096, 128, tokens=1e9)
    strategy = Strategy(parse_guess(MODELS[model]).layout, 2, "selective")
    path = tmp_path / "plan.yaml"
    path.write_text(recipe(judge(asked, strategy, estimators())))
    config = resolve(str(path)).config
    assert config.layout == strategy.layout
    assert (config.train.micro_batch, config.train.recompute) == (2, "selective")
    assert config.train.global_batch == 128
    assert config.train.steps == 1908  # 1e9 / (128 * 4096), upwards
    assert config.data.sequence_length == 4096
    assert config.precision.dtype == "bf16"
    assert config.model.config is not None
    assert parse_config(config.model.config) == asked.shape.config


def test_a_model_that_is_not_ours_has_no_recipe() -> None:
    asked = job("gpt3-13b", "2x8xH100", 2048, 128)
    found = judge(asked, Strategy(parse_guess("dp=16,zero=3").layout, 1, "full"), estimators())
    with pytest.raises(PlanError) as refused:
        recipe(found)
    assert "there is no recipe for gpt3-13b" in str(refused.value)


def test_eight_bits_are_planned_and_said_to_be_sixteen_here() -> None:
    asked = job("llama-3.1-8b", "2x8xH100", 4096, 128, compute="fp8")
    found = judge(asked, Strategy(parse_guess("dp=16,zero=3").layout, 1, "none"), estimators())
    assert "# Products in fp8 were planned; training has bf16." in recipe(found)
    assert "dtype: bf16" in recipe(found)
