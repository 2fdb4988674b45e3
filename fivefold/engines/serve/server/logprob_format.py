"""Log-probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from fivefold.engines.serve.logprobs import Logprob
from fivefold.text.tokenizer import Tokenizer

Step = dict[int, Logprob]
FLOOR = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token stands for, as far as the tokenizer says."""
    if tokenizer.spelling is not None:
        return tokenizer.spelling.bytes_of(token)
    return tokenizer.decode([token], skip_special=False).encode()


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; a piece of a character by its bytes, as OpenAI writes it."""
    spelled = bytes_of(tokenizer, token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionLogprobs:
    """Of one answer, in as many pieces as it comes in: `text_offset` goes on from the last."""

    def __init__(self, tokenizer: Tokenizer, likeliest: int) -> None:
        self._tokenizer = tokenizer
        self._likeliest = likeliest
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[int], steps: Sequence[Step | None]) -> dict[str, Any]:
        """The object of /v1/completions for these tokens; a step may be None for the first."""
        written: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token, step in zip(tokens, steps, strict=True):
            written["tokens"].append(name_of(self._tokenizer, token))
            written["token_logprobs"].append(None if step is None else _plain(step[token]))
            written["top_logprobs"].append(None if step is None else self._top(step))
            written["text_offset"].append(self._offset)
            if token not in self._tokenizer.special_ids:
                self._offset += len(self._decoder.decode(bytes_of(self._tokenizer, token)))
        return written

    def _top(self, step: Step) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in step.items():
            found.setdefault(name_of(self._tokenizer, token), _plain(logprob))
        return found


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], steps: Sequence[Step], likeliest: int
) -> dict[str, Any]:
    """The object of /v1/chat/completions for these tokens."""
    content = []
    for token, step in zip(tokens, steps, strict=True):
        ranked = sorted(step.items(), key=lambda item: item[1].rank)
        top = [_entry(tokenizer, other, logprob) for other, logprob in ranked[:likeliest]]
        content.append({**_entry(tokenizer, token, step[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, steps: Sequence[Step | None] | None
) -> list[dict[str, Any] | None] | None:
    """As vLLM writes them: {token id: {logprob, rank, decoded_token}}, None for the first."""
    if steps is None:
        return None
    return [None if step is None else _of_prompt(tokenizer, step) for step in steps]


def _of_prompt(tokenizer: Tokenizer, step: Step) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": _plain(found),
            "rank": found.rank,
            "decoded_token": name_of(tokenizer, token),
        }
        for token, found in step.items()
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: Logprob) -> dict[str, Any]:
    spelled = bytes_of(tokenizer, token)
    text = spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": _plain(logprob), "bytes": list(spelled)}


def _plain(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
