"""Tokenizer folders: read as transformers reads them, written so that it reads them back."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from text_cases import (
    MULTILINGUAL,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)
from transformers import AutoTokenizer

from fivefold.core.errors import TokenizerError
from fivefold.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "maker", [byte_level_tokenizer, sentencepiece_tokenizer, smollm2_tokenizer]
)
def test_saved_opens_here_and_in_transformers(maker, tmp_path: Path) -> None:
    tokenizer = maker()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (again.bos_id, again.eos_ids, again.pad_id) == (
        tokenizer.bos_id,
        tokenizer.eos_ids,
        tokenizer.pad_id,
    )
    assert other.bos_token_id == tokenizer.bos_id
    assert other.eos_token_id == tokenizer.eos_ids[0]
    assert other.chat_template == (tokenizer.chat.source if tokenizer.chat else None)
    for special in (True, False):
        expected = other(MULTILINGUAL, add_special_tokens=special)["input_ids"]
        assert again.encode_batch(MULTILINGUAL, add_special=special) == expected
        assert [again.encode(text, add_special=special) for text in MULTILINGUAL] == expected
    for ids in again.encode_batch(MULTILINGUAL):
        for skip in (True, False):
            assert again.decode(ids, skip_special=skip) == other.decode(
                ids, skip_special_tokens=skip
            )


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    smollm2_tokenizer().save(tmp_path / "ours")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = Tokenizer.from_folder(tmp_path / "theirs")
    assert tokenizer.chat == smollm2_tokenizer().chat
    assert tokenizer.encode_batch(MULTILINGUAL) == smollm2_tokenizer().encode_batch(MULTILINGUAL)


def test_special_tokens_in_their_older_spellings(tmp_path: Path) -> None:
    byte_level_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|im_end|>", "lstrip": False},
                "pad_token": None,
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ],
                "padding_side": "left",
            }
        )
    )
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2, 0), None)
    assert tokenizer.chat is not None and tokenizer.chat.source == "plain"
    assert tokenizer.settings["padding_side"] == "left"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    chat = Tokenizer.from_folder(tmp_path).chat
    assert chat is not None and chat.source == "from its own file"


def test_stored_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    record = json.loads(tokenizer.backend.to_str())
    record["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    assert Tokenizer.from_folder(tmp_path).encode("abcdef") == tokenizer.encode("abcdef")


def test_it_travels_to_other_processes() -> None:
    tokenizer = smollm2_tokenizer()
    tokenizer.encode("a")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("Hi, you!") == tokenizer.encode("Hi, you!")
    assert again.fingerprint() == tokenizer.fingerprint()


def test_the_fingerprint_tells_templates_and_special_tokens_apart() -> None:
    backend = byte_level_tokenizer().backend
    variants = [
        Tokenizer(backend),
        Tokenizer(backend, chat_template="a"),
        Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"}),
        Tokenizer(backend, stop_ids=[1]),
    ]
    assert len({tokenizer.fingerprint() for tokenizer in variants}) == len(variants)


def test_vocab_size_counts_up_to_the_largest_id() -> None:
    assert smollm2_tokenizer().vocab_size == 49152


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer (looked for tokenizer.json, tokenizer.model"),
        ({"tokenizer.model": "x"}, "has no tokenizer.json, only tokenizer.model"),
        ({"tokenizer.json": "{"}, "tokenizer.json is no tokenizer"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "tokenizer.json is no tokenizer"),
    ],
)
def test_missing_and_damaged(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=re.escape(message)) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value) and error.value.mend


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_settings_are_named(name: str, text: str, tmp_path: Path) -> None:
    byte_level_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=re.escape(f"{name} is no")):
        Tokenizer.from_folder(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there is no folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
