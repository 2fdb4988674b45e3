"""Hugging Face folders: what transformers writes is read, and it opens what is written here."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights_families import (
    CLASSES,
    logits_of_ours,
    logits_of_theirs,
    make_theirs,
    relative_error,
)

from fivefold.core.errors import WeightsError
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.open import load_decoder, load_tokenizer, open_source
from fivefold.weights.save import save_huggingface

FAMILIES = list(CLASSES)
# Both compute in fp32 and in another order; 1e-5 is what the project promises.
TOLERANCE = 1e-5


def written(folder: Path, family: str = "llama", **changes: Any) -> Path:
    make_theirs(family, **changes).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edited = edit({name: value.clone() for name, value in tensors.items()})
    save_file(edited, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    theirs.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert (source.kind, source.config.family, source.has_weights) == ("huggingface", family, True)
    ours = load_decoder(tmp_path)
    assert relative_error(logits_of_ours(ours), logits_of_theirs(theirs)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_opens_in_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = make_theirs(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs")
    tokenizer = Tokenizer.train_bpe(iter(["some text to learn from"]), 300)
    save_huggingface(tmp_path / "ours", ours, ours.config, tokenizer, dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    assert again.dtype == dtype
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype)), name
    if dtype == torch.float32:
        assert torch.equal(logits_of_theirs(again), logits_of_theirs(theirs))
    other = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert other("some text é")["input_ids"] == tokenizer.encode("some text é")
    assert other.chat_template == tokenizer.chat.source
    assert open_source(tmp_path / "ours").config == ours.config
    assert load_tokenizer(tmp_path / "ours").fingerprint() == tokenizer.fingerprint()


def test_ids_that_end_a_text_reach_generation(tmp_path: Path) -> None:
    ours = load_decoder(written(tmp_path / "theirs"))
    save_huggingface(tmp_path / "ours", ours, ours.config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.generation_config.eos_token_id == [2, 5]
    assert model.generation_config.bos_token_id == 1


def test_shards_with_an_index(tmp_path: Path) -> None:
    theirs = make_theirs("qwen2")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ours = load_decoder(tmp_path / "theirs")
    assert relative_error(logits_of_ours(ours), logits_of_theirs(theirs)) < TOLERANCE
    save_huggingface(tmp_path / "ours", ours, ours.config, max_shard_bytes=60_000)
    files = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 70_000 for file in files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert torch.equal(logits_of_theirs(again), logits_of_theirs(theirs))
    # Saved whole into the same folder, and from it: the shards are gone, nothing else is lost.
    mapped = load_decoder(tmp_path / "ours")
    save_huggingface(tmp_path / "ours", mapped, mapped.config)
    assert [p.name for p in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]
    assert torch.equal(logits_of_ours(load_decoder(tmp_path / "ours")), logits_of_ours(ours))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_straight_into_the_wanted_dtype(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    theirs = make_theirs("llama").to(stored)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, dtype=wanted)
    value = theirs.model.layers[1].self_attn.k_proj.weight
    assert torch.equal(ours.layers[1].attention.key.weight, value.to(wanted))
    assert all(parameter.dtype == wanted for parameter in ours.parameters())
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_writing_to_loaded_weights_leaves_the_file(tmp_path: Path) -> None:
    before = (written(tmp_path) / "model.safetensors").read_bytes()
    ours = load_decoder(tmp_path)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not torch.equal(load_decoder(tmp_path).norm.weight, ours.norm.weight)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
)
def test_other_spellings_of_the_names(rename: Any, tmp_path: Path) -> None:
    theirs = make_theirs("gemma3_text")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_tensors(
        tmp_path,
        lambda tensors: (
            {rename(name): value for name, value in tensors.items()}
            | {
                "vision_tower.patch.weight": torch.zeros(2),
                "multi_modal_projector.w": torch.zeros(2),
            }
        ),
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": config})
    )
    ours = load_decoder(tmp_path)
    assert relative_error(logits_of_ours(ours), logits_of_theirs(theirs)) < TOLERANCE


def test_what_a_decoder_can_do_without_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path)
    edit_tensors(
        tmp_path,
        lambda tensors: (
            tensors
            | {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    load_decoder(tmp_path)


def test_a_configuration_alone(tmp_path: Path, shared_data: Path) -> None:
    written(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    source = open_source(tmp_path)
    assert not source.has_weights and not source.has_tokenizer
    with pytest.raises(WeightsError, match="holds no weights"):
        load_decoder(tmp_path)
    config = open_source(shared_data / "hf-configs" / "transcribed" / "SmolLM2-135M_config.json")
    assert config.config.num_layers == 30 and not config.has_weights


def test_links_inside_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot there is a folder of links to blobs two folders up."""
    make_theirs("llama").save_pretrained(tmp_path / "real", max_shard_size="60KB")
    repository = tmp_path / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "real").iterdir())):
        shutil.copy(file, repository / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    load_decoder(snapshot)
    # Links may lead to the blobs; what an index says may not.
    index = snapshot / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, file = next(iter(weight_map.items()))
    blob = (snapshot / file).resolve()
    index.unlink()
    for escape in (f"../../blobs/{blob.name}", str(blob)):
        index.write_text(json.dumps({"weight_map": weight_map | {name: escape}}))
        with pytest.raises(WeightsError, match="lies outside its folder"):
            load_decoder(snapshot)


def test_saving_what_does_not_belong_to_the_configuration(tmp_path: Path) -> None:
    ours = load_decoder(written(tmp_path / "a"))
    state = dict(ours.named_parameters())
    norm = state.pop("norm.weight")
    with pytest.raises(WeightsError, match=r"weights to save lack norm\.weight"):
        save_huggingface(tmp_path / "b", state, ours.config)
    state |= {"norm.weight": norm, "head.weight": norm}
    with pytest.raises(WeightsError, match=r"have head\.weight besides"):
        save_huggingface(tmp_path / "b", state, ours.config)


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    ours = load_decoder(written(tmp_path / "a"))
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot write"):
        save_huggingface(tmp_path / "file" / "b", ours, ours.config)


# Bad folders: how each is spoiled, and what must be said about it.


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def other_model(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="mamba")


def other_weights(folder: Path) -> None:
    save_file(
        {"transformer.wte.weight": torch.zeros(9, 4), "transformer.h.0.ln_1.bias": torch.ones(4)},
        folder / "model.safetensors",
    )


def one_missing(folder: Path) -> None:
    edit_tensors(
        folder, lambda t: {k: v for k, v in t.items() if k != "model.layers.1.mlp.up_proj.weight"}
    )


def one_more(folder: Path) -> None:
    edit_tensors(folder, lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})


def more_layers(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=2)


def other_shape(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=100)


def other_dtype(folder: Path) -> None:
    edit_tensors(folder, lambda t: t | {"model.norm.weight": torch.ones(64, dtype=torch.int8)})


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


BAD = {
    no_config: "has no config.json",
    no_json: "config.json is no JSON",
    other_model: "model_type 'mamba' is not covered",
    other_weights: "holds the weights of another architecture (transformer.h.0.ln_1.bias,",
    one_missing: "lacks 1 of 29 tensors: layers.1.feed_forward.up.weight",
    one_more: "does not have: model.layers.0.self_attn.q_proj.bias",
    more_layers: "does not have: model.layers.2.",
    other_shape: "has shape [96, 64], but the configuration makes it [100, 64]",
    other_dtype: "model.norm.weight in",
    pickled: "only as pickles (pytorch_model.bin)",
}


@pytest.mark.parametrize("spoil", BAD)
def test_bad_folders(spoil: Any, tmp_path: Path) -> None:
    spoil(written(tmp_path))
    with pytest.raises(WeightsError, match=re.escape(BAD[spoil])) as error:
        load_decoder(tmp_path)
    assert "\n" not in str(error.value) and error.value.mend


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/tmp/outside.safetensors", "a/../../b", "", "a\\b", "link"],
)
def test_an_index_leads_nowhere_outside(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_theirs("llama").save_pretrained(folder, max_shard_size="60KB")
    first = next(folder.glob("model-00001*"))
    shutil.copy(first, tmp_path / "outside.safetensors")
    (folder / "link").symlink_to(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = next(name for name, place in weight_map.items() if place == first.name)
    edit_json(index, weight_map=weight_map | {name: file})
    with pytest.raises(WeightsError, match="lies outside its folder"):
        load_decoder(folder)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    make_theirs("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    name = next(name for name, place in weight_map.items() if place == files[0])
    edit_json(index, weight_map=weight_map | {name: files[1]})
    with pytest.raises(WeightsError, match=f"{files[1]} lacks {re.escape(name)}"):
        load_decoder(tmp_path)
    edit_json(index, weight_map=weight_map)
    (tmp_path / files[1]).unlink()
    with pytest.raises(WeightsError, match=f"in {files[1]}, which is missing"):
        load_decoder(tmp_path)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(WeightsError, match="is damaged"):
        load_decoder(tmp_path)
