"""The bytes that each token stands for, where the tokenizer's decoder says so plainly."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from fivefold.text.byte_level import byte_of_character
from fivefold.text.sentencepiece_bpe import SPACE

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """Token ids to bytes. Texts are their tokens' bytes in a row, but for one leading space."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, byte_level: bool, strips_space: bool
    ) -> None:
        self._backend = backend
        self._byte_level = byte_level
        self.strips_space = strips_space  # one space at the start of a text is not part of it
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id outside the vocabulary."""
        if token_id not in self._known:
            token = self._backend.id_to_token(token_id)
            self._known[token_id] = b"" if token is None else self._spell(token)
        return self._known[token_id]

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            alphabet = byte_of_character()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()
        if match := _BYTE_PIECE.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(SPACE, " ").encode()


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling | None:
    """How this pipeline spells; None when its decoder is neither byte-level nor SentencePiece's."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return Spelling(backend, byte_level=True, strips_space=False)
    steps = decoder.get("decoders", [])
    if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP]):
        return Spelling(backend, byte_level=False, strips_space=bool(steps[3:]))
    return None


_SENTENCEPIECE: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
