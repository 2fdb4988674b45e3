"""SentencePiece BPE pipelines (Kudo and Richardson 2018: Llama 2, Mistral, Gemma) from scores.

SentencePiece joins the neighbours whose union has the highest score. Here every way of cutting a
piece in two known pieces becomes a merge, ordered by the score of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE = "▁"


class PieceKind(IntEnum):
    """What a vocabulary entry is for, as SentencePiece and GGUF number it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    add_space_prefix: bool,
) -> tokenizers.Tokenizer:
    """A pipeline whose token i is `pieces[i]`; special tokens are added by the caller.

    Characters without a piece are spelled in bytes (`<0xE6>` …). `add_space_prefix`: a text, and
    what follows a special token, begins with a space that decoding removes again.
    """
    unknown = [
        piece for piece, kind in zip(pieces, kinds, strict=True) if kind == PieceKind.UNKNOWN
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges_of(pieces, scores, kinds),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        spaces.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def merges_of(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies, best first."""
    joined = (PieceKind.NORMAL, PieceKind.UNUSED)
    known = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind in joined}
    found = []
    for i, (piece, score, kind) in enumerate(zip(pieces, scores, kinds, strict=True)):
        if kind not in joined:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                found.append((-score, i, -cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
