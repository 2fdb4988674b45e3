"""Special tokens of a pipeline that was built from a bare vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from fivefold.text.sentencepiece_bpe import PieceKind


def add_special_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    kinds: Sequence[int],
    also: Collection[int] = (),
) -> None:
    """Take control, unknown and user-defined tokens whole wherever their text stands.

    `also`: ids that are special whatever their kind. User-defined ones stay part of decoded text.
    """
    special, plain = [], []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN) or i in also:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == PieceKind.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let `encode` put `bos` before a text and `eos` after it."""
    around = [token for token in (bos, eos) if token is not None]
    if around:
        backend.post_processor = TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
        )
