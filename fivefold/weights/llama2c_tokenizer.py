"""The tokenizer of llama2.c: a SentencePiece vocabulary with scores.

int32         longest piece, in bytes
per piece     fp32 score, int32 length, UTF-8 text in which spaces are plain
"""

from __future__ import annotations

import struct
from pathlib import Path

from fivefold.core.errors import TokenizerError
from fivefold.text.sentencepiece_bpe import SPACE, PieceKind, sentencepiece_bpe
from fivefold.text.special import add_special_tokens, surround
from fivefold.text.tokenizer import Tokenizer

_LONGEST = struct.Struct("<i")
_PIECE = struct.Struct("<fi")
_SPECIAL = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2; the file spells the last two with line breaks
_BYTES = 256


def find_tokenizer(model: Path, vocab_size: int) -> Path | None:
    """The tokenizer beside a model: the one named for its vocabulary, else the only one."""
    named = [model.parent / f"tok{vocab_size}.bin", model.parent / "tokenizer.bin"]
    others = [path for path in sorted(model.parent.glob("tok*.bin")) if path != model]
    found = [path for path in named if path.is_file()] or (others if len(others) == 1 else [])
    return found[0] if found else None


def read_tokenizer(model: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a llama2.c model. Raises TokenizerError when it is missing or damaged."""
    path = find_tokenizer(model, vocab_size)
    if path is None:
        raise TokenizerError(
            f"there is no tokenizer beside {model} (looked for tok{vocab_size}.bin, "
            "tokenizer.bin, one tok*.bin)",
            "put the tokenizer of the model there",
        )
    pieces, scores = _read_pieces(path, vocab_size)
    kinds = [PieceKind.NORMAL] * vocab_size
    kinds[:3] = [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.CONTROL]
    kinds[3 : 3 + _BYTES] = [PieceKind.BYTE] * _BYTES
    pieces[:3] = _SPECIAL
    backend = sentencepiece_bpe(pieces, scores, kinds, add_space_prefix=True)
    add_special_tokens(backend, pieces, kinds)
    unk, bos, eos = _SPECIAL
    surround(backend, bos, None)
    return Tokenizer(backend, special_tokens={"bos_token": bos, "eos_token": eos, "unk_token": unk})


def _read_pieces(path: Path, count: int) -> tuple[list[str], list[float]]:
    data = path.read_bytes()
    pieces, scores = [], []
    at = _LONGEST.size
    try:
        for _ in range(count):
            score, length = _PIECE.unpack_from(data, at)
            at += _PIECE.size
            if not 0 <= length <= len(data) - at:
                raise struct.error("a piece beyond the end")
            pieces.append(data[at : at + length].decode("utf-8").replace(" ", SPACE))
            scores.append(score)
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path} is damaged at piece {len(pieces)} of {count}, byte {at}: {error}",
            "copy it again from the model's origin",
        ) from None
    if at != len(data) or len(pieces) < len(_SPECIAL) + _BYTES:
        raise TokenizerError(
            f"{path} has {len(data)} bytes, a vocabulary of {count} pieces ends at {at}",
            "put the tokenizer of the model beside it",
        )
    return pieces, scores
