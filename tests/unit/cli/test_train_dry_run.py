"""`fivefold train --dry-run`: the tables, the numbers, the errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.core.errors import ConfigError, FivefoldError, LayoutError
from fivefold.core.resolve import resolve
from fivefold.engines.train.dry_run.account import Collective
from fivefold.engines.train.dry_run.report import size
from fivefold.engines.train.dry_run.run import one_of_each_stage
from fivefold.model.families import parse_config

TINY = {
    "model": {"config": {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 32, "tie_word_embeddings": False, "moe_intermediate_size": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }},
    "train": {"global_batch": 8, "micro_batch": 1},
    "data": {"sequence_length": 16},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


def train(*arguments: str) -> str:
    shown = CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "100"})
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    assert shown.exit_code == 0, shown.output
    return shown.output


def test_the_tables_say_what_a_rank_holds_and_moves(recipe: str, tmp_path: Path) -> None:
    printed = train(recipe, "--layout", "dp_shard=4,ep=2", "--dry-run")
    assert printed.startswith("tiny on 4 ranks (dp_shard=4,ep=2,zero=3): one step of a rank\n")
    for word in ("parameters", "activations", "all-to-all", "reduce-scatter", "expert_shard"):
        assert word in printed
    assert not list(tmp_path.glob("runs*")), "nothing is written"


def test_json_has_every_stage(recipe: str) -> None:
    printed = train(
        recipe, "--layout", "pp=2,dp_shard=2", "--dry-run", "--dry-run-rank", "stages", "--json"
    )
    found = json.loads(printed)
    assert (found["layout"], found["world_size"]) == ("dp_shard=2,pp=2,zero=3", 4)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2]
    assert [rank["coordinates"]["pp"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        held = rank["bytes"]
        assert held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"] > 0
        assert held["activations"] < held["peak"]
        assert {"send", "recv"} <= {c["kind"] for c in rank["collectives"]}


def test_one_rank_moves_nothing(recipe: str) -> None:
    (rank,) = json.loads(train(recipe, "--dry-run", "--json"))["ranks"]
    assert rank["collectives"] == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--dry-run", "--dry-run-rank", "4", "--layout", "dp_shard=4"], ConfigError,
         "there is no rank 4 among the 4 of the layout; choose one from 0 to 3"),
        (["--dry-run", "--dry-run-rank", "last"], ConfigError,
         "--dry-run-rank 'last' is no rank; give a number, or `stages`"),
        (["--json"], ConfigError, "--json and --dry-run-rank say how a dry run is shown"),
        (["--dry-run-rank", "1"], ConfigError, "add --dry-run"),
        (["--dry-run", "--layout", "dp_shard=4,ep=3"], LayoutError, "ep=3"),
        (["--dry-run", "--layout", "pp=4", "--set", "train.global_batch=8"], LayoutError,
         "2 layers cannot be split into 4 pipeline stages"),
        (["--dry-run", "--layout", "dp_shard=3"], ConfigError, "not a multiple"),
        (["--dry-run", "--set", "precision.dtype=fp64"], ConfigError,
         "would need to know how many tokens each is given; use precision.dtype=bf16 or fp32"),
        (["--dry-run", "--set", "moe.capacity_factor=1.0"], ConfigError,
         "set moe.capacity_factor to null"),
    ],
)  # fmt: skip
def test_bad_input(
    recipe: str, arguments: list[str], error: type[FivefoldError], message: str
) -> None:
    with pytest.raises(error) as raised:
        train(recipe, *arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "layout", "world", "parameters"),
    [
        # As published: 405B and 671B, the latter without its module for further tokens.
        ("llama3.1-405b", "tp=8,pp=16,dp_shard=128", 16_384, 405_853_388_800),
        ("deepseek-v3", "pp=16,dp_shard=128,ep=64", 2_048, 671_026_404_352),
    ],
)
def test_the_large_recipes(name: str, layout: str, world: int, parameters: int) -> None:
    from fivefold.model.decoder import Decoder

    config = resolve(name, layout=layout).config
    assert config.layout.world_size == world
    assert config.model.config is not None
    decoder = Decoder(parse_config(config.model.config), device="meta")
    assert sum(p.numel() for p in decoder.parameters()) == parameters


def test_a_rank_of_each_stage() -> None:
    layout = resolve("llama3.1-405b").config.layout
    assert one_of_each_stage(layout)[:3] == [0, 1024, 2048]
    inner = layout.model_copy(update={"order": ("dp_replicate", "dp_shard", "cp", "tp", "pp")})
    assert one_of_each_stage(inner) == list(range(16))


def test_what_a_ring_sends() -> None:
    assert Collective("all-reduce", "tp", 4, 1, 100).sent == 150
    assert Collective("all-gather", "tp", 4, 1, 100).sent == 75
    assert Collective("send", "pp", 4, 1, 100).sent == 100
    assert Collective("recv", "pp", 4, 1, 100).sent == 0


def test_sizes_are_short() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 GiB",
    ]
