"""Learning a byte-level BPE vocabulary (Sennrich et al. 2016, Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fivefold.core.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]


def train_byte_level_bpe(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A pipeline of at most `vocab_size` tokens, in which every text can be written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise TokenizerError(
            f"a byte-level vocabulary of {vocab_size} tokens has no room for its "
            f"{len(alphabet)} bytes and {len(SPECIAL_TOKENS)} special tokens",
            f"use {smallest} or more",
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Single digits, so that numbers are spelled alike wherever they stand.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
