"""The text of a growing list of tokens, piece by piece, never with half a character in it."""

from __future__ import annotations

import codecs

from fivefold.text.spelling import Spelling
from fivefold.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """What `tokenizer.decode` gives, while the tokens come.

    All that `push` returned, and then `finish`, is the text of the tokens. Bytes that do not yet
    make a character are held back; U+FFFD stands only for bytes that can no longer become one.
    (For those a SentencePiece `decode` spoils the valid byte tokens around them as well, which
    a stream has already given out.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._stream: _ByteStream | _WindowStream = (
            _WindowStream(tokenizer)
            if tokenizer.spelling is None
            else _ByteStream(tokenizer.spelling)
        )

    def push(self, token_id: int) -> str:
        """The text that this token completes; often a word, possibly nothing."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def finish(self) -> str:
        """What was held back, at the end of the tokens."""
        return self._stream.finish()


class _ByteStream:
    """Tokens whose bytes are known: an incremental UTF-8 decoder does the work."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._strip_next = spelling.strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._trim(self._decoder.decode(self._spelling.bytes_of(token_id)))

    def finish(self) -> str:
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """Any other tokenizer: decode the last tokens with and without the new one, and compare.

    The window starts at the tokens of the piece before, for decoders that look one token back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # leading tokens of the window whose text was given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._given = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._given], skip_special=False)
        return self._tokenizer.decode(self._ids, skip_special=False)[len(before) :]
