"""Configuration: where values come from, and what is refused, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.core.config import RunConfig
from fivefold.core.errors import ConfigError, FivefoldError, LayoutError
from fivefold.core.resolve import build, describe_keys, flatten, recipes, resolve


def test_later_sources_win_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: smollm2\ntrain: {steps: 7, seed: 3}\noptimizer: {lr: 1e-3}\n")
    found = resolve(str(file), layout="dp_shard=2", sets=["train.seed=9", "layout.zero=2"])
    assert (found.config.train.steps, found.config.train.seed) == (7, 9)
    assert found.config.optimizer.lr == 1e-3
    assert (found.config.layout.dp_shard, found.config.layout.zero) == (2, 2)
    assert found.origin("train.steps") == f"file {file}"
    assert found.origin("train.seed") == "--set"
    assert found.origin("layout.dp_shard") == "--layout"
    assert found.origin("layout.zero") == "--set"
    assert found.origin("train.micro_batch") == "default"
    assert found.origin("model.source") == f"file {file}"
    assert found.name == "mine"


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_resolves(name: str) -> None:
    assert isinstance(resolve(name).config, RunConfig)


def test_a_resolved_configuration_survives_yaml() -> None:
    config = resolve("quickstart").config
    assert build(config.model_dump(mode="json")) == config


def test_a_model_named_by_set_replaces_the_recipes_own() -> None:
    config = resolve("quickstart", sets=["model=smollm2"]).config
    assert (config.model.source, config.model.config) == ("smollm2", None)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.step=5"], "unknown key train.step; did you mean 'train.steps'?"),
        (["steps=3"], "unknown key steps; did you mean 'train.steps'?"),
        (["optimiser.lr=3"], "unknown key optimiser; did you mean 'optimizer'?"),
        (["train.steps=abc"], "train.steps: input should be a valid integer"),
        (["train.steps=-1"], "train.steps: input should be greater than or equal to 1"),
        (
            ["precision.dtype=int8"],
            "precision.dtype: input should be 'fp32', 'bf16', 'fp16' or 'fp64'",
        ),
        (["train.global_batch=7"], "train.global_batch=7 is not a multiple of"),
        (["data.sources=[{pth: x}]"], "unknown key data.sources.0.pth; did you mean"),
        (["model.source=a"], "model: give exactly one of"),
        (["train.steps"], "is not KEY=VALUE"),
        (["layout.tpp=2"], "unknown key layout.tpp; did you mean 'layout.tp'?"),
        (["data.sources=[]"], "data.sources"),
        (["optimizer.lr=.nan"], "optimizer.lr"),
    ],
)
def test_bad_values_are_named(sets: list[str], message: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        resolve("quickstart", sets=sets)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1}\n", "model is missing"),
        ("model: smollm2\nmodel: other\n", "line 2: key 'model' is written twice"),
        ("model: [\n", "mend the YAML"),
        ("- a\n", "holds no mapping"),
        ("model: smollm2\ntrain: 3\n", "train: "),
        ("model: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as caught:
        resolve(str(file))
    assert "\n" not in str(caught.value)


def test_missing_and_misspelled_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        resolve("quickstrat")
    (tmp_path / "train.yaml").write_text("model: smollm2\n")
    with pytest.raises(ConfigError, match=r"did you mean .train\.yaml."):
        resolve(str(tmp_path / "trian.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(ConfigError, match="cannot read"):
        resolve(str(tmp_path / "latin.yaml"))


def test_layout_errors() -> None:
    with pytest.raises(LayoutError, match="did you mean 'dp_shard'"):
        resolve("quickstart", layout="dp_shards=2")
    with pytest.raises(LayoutError, match="not a positive whole number"):
        resolve("quickstart", layout="dp_shard=0")
    with pytest.raises(LayoutError, match="not AXIS=N"):
        resolve("quickstart", layout="dp_shard")
    layout = resolve("quickstart", layout="dp_replicate=2,dp_shard=2").config.layout
    assert (layout.dp, layout.world_size, str(layout)) == (4, 4, "dp_replicate=2,dp_shard=2,zero=3")
    with pytest.raises(LayoutError, match=r"needs 4 ranks, but 2 were started.*--nproc 4"):
        layout.check_world(2)


def test_every_key_is_described() -> None:
    keys = {key for key, _, _ in describe_keys()}
    for key in (
        "model.source", "layout.dp_shard", "train.steps", "train.seed", "train.global_batch",
        "train.micro_batch", "train.deterministic", "data.sequence_length", "optimizer.lr",
        "checkpoint.every", "precision.dtype",
    ):  # fmt: skip
        assert key in keys


def test_flatten_keeps_lists_whole() -> None:
    assert flatten({"a": {"b": [1, 2]}, "c": {}}) == {"a.b": [1, 2], "c": {}}
