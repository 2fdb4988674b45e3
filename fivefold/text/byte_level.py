"""Byte-level BPE pipelines (GPT-2, Llama 3, Qwen, SmolLM) from a vocabulary and its merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from fivefold.core.errors import TokenizerError, nearest

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS_AND_SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SYMBOLS_AND_SPACES
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How text is cut before merging, by llama.cpp's names. None: GPT-2's pattern, which is built in;
# DIGITS: that, after single digits were cut off.
DIGITS = "digits"
SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "mpt": None,
    "olmo": None,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}
# Their vocabularies hold words that no merge makes: a piece that is a token stays whole.
_WHOLE_WORDS = (_LLAMA3, _TEKKEN)


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], split: str
) -> tokenizers.Tokenizer:
    """A pipeline whose token i is `tokens[i]`; special tokens are added by the caller.

    `split` is a key of SPLITS. Raises TokenizerError for another one: cutting text in a way that
    the model was not trained with goes unnoticed and costs quality.
    """
    if split not in SPLITS:
        raise TokenizerError(
            f"has the pre-tokenizer {split!r}, which is not covered", nearest(split, SPLITS)
        )
    pattern = SPLITS[split]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pattern in _WHOLE_WORDS)
    )
    byte_level = pre_tokenizers.ByteLevel
    if pattern is None:
        backend.pre_tokenizer = byte_level(add_prefix_space=False)
    elif pattern == DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                byte_level(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def byte_of_character() -> Mapping[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte, to that byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    shown += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }
