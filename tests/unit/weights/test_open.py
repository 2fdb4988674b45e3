"""What a name or path means is told from what lies there, and else said in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from weights_families import logits_of_ours, make_theirs

from fivefold.core.errors import FivefoldError, TokenizerError, WeightsError
from fivefold.engines.train.checkpoint.checkpointer import Checkpointer, TrainState
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.model_files import write_model_files
from fivefold.weights.open import load_decoder, load_tokenizer, open_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_theirs("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def checkpoint(run: Path, folder: Path, tokenizer: Tokenizer | None = None) -> None:
    source, decoder = open_source(folder), load_decoder(folder)
    checkpointer = Checkpointer(
        run / "checkpoints",
        keep=2,
        asynchronous=False,
        model_files=lambda path: write_model_files(path, source.config, tokenizer),
    )
    tensors = {f"model/{name}": value.detach() for name, value in decoder.named_parameters()}
    for step in (1, 2):
        checkpointer.save(TrainState(step, tensors | {"optimizer/x": torch.ones(2)}, {}, {}))
    checkpointer.wait()


@pytest.mark.parametrize(
    "below", [".", "checkpoints", "checkpoints/step-00000001", "checkpoints/latest"]
)
def test_a_run_and_what_is_in_it(below: str, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tokenizer = Tokenizer.train_bpe(iter(["text"]), 300)
    checkpoint(run, folder, tokenizer)
    source = open_source(run / below)
    assert source.kind == "checkpoint" and source.has_weights and source.has_tokenizer
    assert source.path.name == ("step-00000001" if "step" in below else "step-00000002")
    assert source.config == open_source(folder).config
    assert source.tokenizer().encode("text") == tokenizer.encode("text")
    expected = logits_of_ours(load_decoder(folder))
    assert torch.equal(logits_of_ours(load_decoder(run / below)), expected)
    half = load_decoder(run / below, dtype=torch.bfloat16)
    assert half.norm.weight.dtype == torch.bfloat16
    assert torch.equal(source.get("norm.weight", torch.bfloat16), half.norm.weight)


def test_a_checkpoint_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", folder)
    source = open_source(tmp_path / "run")
    assert not source.has_tokenizer
    with pytest.raises(TokenizerError, match=r"has no tokenizer \(looked for"):
        source.tokenizer()


def test_a_damaged_checkpoint(folder: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", folder)
    data = next((tmp_path / "run" / "checkpoints" / "step-00000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-7])
    with pytest.raises(FivefoldError, match="is truncated"):
        load_decoder(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle", "did you mean 'model'?"),
        ("org/some-name", "nor"),
        ("nothing-alike-at-all", "known names: smollm2"),
    ],
)
def test_nothing_there(
    name: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(WeightsError, match=re.escape(message)) as error:
        open_source(name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_name_nearly_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match=r"no model smolm2; did you mean 'smollm2'\?"):
        open_source("smolm2")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("model.safetensors", b"12345678", "holds weights without a configuration"),
        ("pytorch_model.bin", b"PK\x03\x04....", "is a pickle"),
        ("old.bin", b"\x80\x02}q\x00.", "is a pickle"),
        ("model.pt", b"anything", "is a pickle"),
        ("text.txt", b"some text", "is in no format that is read"),
        ("empty", b"", "is in no format that is read"),
        ("config.json", b"{", "config.json is no JSON"),
        ("broken.gguf", b"nothing", "is no GGUF file"),
    ],
)
def test_files_that_are_no_models(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WeightsError, match=message) as error:
        open_source(tmp_path / name)
    assert name in str(error.value) and error.value.mend


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json; give a Hugging Face"):
        open_source(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"give the file: .*some\.gguf"):
        open_source(tmp_path)


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train_bpe(iter(["text"]), 300)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer.fingerprint()
    with pytest.raises(TokenizerError, match="there is no folder"):
        Tokenizer.from_folder(tmp_path / "none")


def test_a_model_without_a_tokenizer(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer \(looked for tokenizer\.json,"):
        load_tokenizer(folder)
