"""Which tokens of a conversation are answers: exactly those the assistant has to write."""

from __future__ import annotations

from typing import Any

import pytest
from test_chat import GEMMA, LLAMA3, QWEN3
from text_cases import byte_level_tokenizer, sentencepiece_tokenizer, smollm2_tokenizer

from fivefold.core.errors import TokenizerError
from fivefold.text.chat import CHATML
from fivefold.text.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": " Rayleigh scattering — 日本語, née.\n"},
    {"role": "user", "content": "assistant: say <|im_start|> nothing"},
    {"role": "assistant", "content": "OK"},
]
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant:{% endif %}"


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    if tokenizer.spelling and not tokenizer.spelling.strips_space:
        return Tokenizer(tokenizer.backend, special_tokens=tokens, chat_template=template)
    return Tokenizer(
        tokenizer.backend, special_tokens=tokenizer.special_tokens, chat_template=template
    )


def answers(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """Each run of masked tokens as text, special tokens included."""
    ids, mask = tokenizer.encode_chat(messages)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    before = False
    for i, answer in zip(ids, mask, strict=True):
        if answer and not before:
            runs.append([])
        if answer:
            runs[-1].append(i)
        before = answer
    return [tokenizer.decode(run, skip_special=False) for run in runs]


def test_smollm2_answers_end_with_their_turn() -> None:
    tokenizer = smollm2_tokenizer()
    assert answers(tokenizer, MESSAGES) == [
        " Rayleigh scattering — 日本語, née.\n<|im_end|>",
        "OK<|im_end|>",
    ]
    ids, _ = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.chat is not None
    assert ids == tokenizer.encode(
        tokenizer.chat.render(MESSAGES, add_generation_prompt=False), add_special=False
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [" Rayleigh scattering — 日本語, née.\n<|im_end|>", "OK<|im_end|>"]),
        (LLAMA3, ["Rayleigh scattering — 日本語, née.<|eot_id|>", "OK<|eot_id|>"]),
        (GEMMA, ["Rayleigh scattering — 日本語, née.<end_of_turn>\n", "OK<end_of_turn>\n"]),
        (PLAIN, ["  Rayleigh scattering — 日本語, née.\n\n\n", " OK\n\n"]),
    ],
)
def test_answers_under_other_templates(template: str, expected: list[str]) -> None:
    """Where no special token ends a turn (Gemma's here is plain text), all that is added counts."""
    tokenizer = with_template(byte_level_tokenizer(), template)
    assert answers(tokenizer, MESSAGES) == expected


def test_sentencepiece_answers() -> None:
    tokenizer = with_template(sentencepiece_tokenizer(), MISTRAL)
    turns = [message for message in MESSAGES if message["role"] != "system"]
    first, second = answers(tokenizer, turns)
    assert first.strip() == "Rayleigh scattering — 日本語, née.\n</s>"
    assert second.strip() == "OK</s>"


def test_qwen3_answers_without_thoughts() -> None:
    tokenizer = with_template(byte_level_tokenizer(), QWEN3)
    assert answers(tokenizer, MESSAGES)[1] == "OK<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    thinking = [dict(message) for message in MESSAGES]
    thinking[2]["content"] = "<think>hm</think>Because."
    tokenizer = with_template(byte_level_tokenizer(), QWEN3)
    with pytest.raises(TokenizerError, match="writes message 3 of 5 differently"):
        tokenizer.encode_chat(thinking)
    assert answers(tokenizer, thinking[:3]) == ["<think>\nhm\n</think>\n\nBecause.<|im_end|>"]


def test_without_assistant_nothing_is_an_answer() -> None:
    ids, mask = smollm2_tokenizer().encode_chat(MESSAGES[:2])
    assert ids and not any(mask)


def test_without_a_template() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        sentencepiece_tokenizer().encode_chat(MESSAGES)
