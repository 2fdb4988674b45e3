"""A vocabulary learned from text is the same each time, and writes every text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from text_cases import MULTILINGUAL, STORY
from transformers import AutoTokenizer

from fivefold.core.errors import TokenizerError
from fivefold.text.tokenizer import Tokenizer

# The standard library's own source: real text with ties between equally frequent pairs.
PROGRAM = """
import json, pathlib
from fivefold.text.tokenizer import Tokenizer
texts = [p.read_text() for p in sorted(pathlib.Path(json.__file__).parent.glob("*.py"))]
print(Tokenizer.train_bpe(iter(texts), 700).fingerprint())
"""


def test_the_same_in_every_process() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    prints = {run.stdout.strip() for run in runs}
    assert len(prints) == 1
    assert len(prints.pop()) == 64


def test_every_text_is_written_and_special_tokens_come_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train_bpe(iter([STORY] * 5), 300)
    assert tokenizer.vocab_size == 300
    names = [tokenizer.backend.id_to_token(i) for i in range(3)]
    assert names == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_ids == (0, 2) and tokenizer.pad_id == 0 and tokenizer.bos_id is None
    for text in MULTILINGUAL:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert len(tokenizer.encode(STORY)) < len(STORY.encode()) / 1.5  # it did learn
    assert tokenizer.encode("1234") == [tokenizer.encode(digit)[0] for digit in "1234"]
    tokenizer.save(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert other(MULTILINGUAL)["input_ids"] == tokenizer.encode_batch(MULTILINGUAL)


def test_few_texts_give_a_smaller_vocabulary() -> None:
    assert Tokenizer.train_bpe(iter(["ab"]), 5000).vocab_size == 260


def test_a_vocabulary_without_room_for_bytes() -> None:
    with pytest.raises(TokenizerError, match=r"258 tokens has no room .* use 259 or more"):
        Tokenizer.train_bpe(iter(["a"]), 258)
