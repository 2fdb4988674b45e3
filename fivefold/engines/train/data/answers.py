"""Where the answers stand in a rendered conversation, whatever the template."""

from __future__ import annotations

from typing import Any

from fivefold.engines.train.data.documents import ANSWERING_ROLE
from fivefold.text.chat import ChatTemplate

# Private-use characters, so that no template strips or splits it.
MARK = "\ue0f0answer\ue0f1"


def find_answers(
    template: ChatTemplate, messages: list[dict[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the [start, stop) characters of each assistant's content.

    Each answer in turn is replaced by a mark: what differs from the true rendering is the
    answer. This asks nothing of the template: it may strip the content, move parts of it (a
    thought before the answer) or leave it out.
    """
    text = template.render(messages, add_generation_prompt=False)
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != ANSWERING_ROLE or not message["content"]:
            continue
        marked_message = {**message, "content": MARK}
        marked = template.render(
            [*messages[:index], marked_message, *messages[index + 1 :]], add_generation_prompt=False
        )
        before, found, after = marked.partition(MARK)
        if not found:
            continue
        start = _shared_prefix(text, before)
        stop = len(text) - _shared_prefix(text[::-1], after[::-1])
        if start < stop:
            answers.append((start, stop))
    return text, answers


def _shared_prefix(text: str, beginning: str) -> int:
    if text.startswith(beginning):  # nearly always, and much faster
        return len(beginning)
    pairs = zip(text, beginning, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other),
        min(len(text), len(beginning)),
    )
