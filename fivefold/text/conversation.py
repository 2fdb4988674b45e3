"""Conversations for training: the ids of a chat, and which of them the model answers for.

The answers are found by rendering: what the template adds between `messages[:i]` with a generation
prompt and `messages[:i + 1]` is what the assistant has to write. Each of these texts must be a
beginning of the whole one; a template that rewrites earlier turns (drops their reasoning, moves
the system message) is refused, as the model would otherwise be trained on what it never sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

import tokenizers

from fivefold.core.errors import TokenizerError
from fivefold.text.chat import ChatTemplate, Message

ASSISTANT = "assistant"


class Span(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


def encode_conversation(
    backend: tokenizers.Tokenizer,
    special_ids: Collection[int],
    chat: ChatTemplate,
    messages: Sequence[Message],
) -> tuple[list[int], list[bool]]:
    """Ids of the conversation, and for each whether it belongs to an assistant's answer.

    An answer includes the token that ends the turn, not the white space after it. A token across
    the start of an answer counts as prompt. Raises TokenizerError for a template that does not
    build a conversation up from its beginning.
    """
    text = chat.render(messages, add_generation_prompt=False)
    encoding = backend.encode(text, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]
    mask = [False] * len(starts)
    for span in answer_spans(chat, messages, text):
        first, last = bisect_left(starts, span.start), bisect_left(starts, span.end)
        # The end of the turn is the last special token, when nothing but white space follows it.
        ends = [i for i in range(first, last) if encoding.ids[i] in special_ids]
        if ends and not text[encoding.offsets[ends[-1]][1] : span.end].strip():
            last = ends[-1] + 1
        mask[first:last] = [True] * (last - first)
    return encoding.ids, mask


def answer_spans(chat: ChatTemplate, messages: Sequence[Message], text: str) -> list[Span]:
    """Where in `text`, the whole conversation, the assistant's answers lie."""
    spans = []
    for i, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        prompt = chat.render(messages[:i], add_generation_prompt=True)
        answered = chat.render(messages[: i + 1], add_generation_prompt=False)
        if not (text.startswith(answered) and answered.startswith(prompt)):
            raise TokenizerError(
                f"the chat template writes message {i + 1} of {len(messages)} differently when"
                " more follow, so its answer cannot be told from the prompt",
                "train on conversations that end with it, or use another chat template",
            )
        spans.append(Span(len(prompt), len(answered)))
    return spans
