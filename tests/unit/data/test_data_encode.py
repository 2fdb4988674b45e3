"""Which tokens a document becomes, and which of them are learnt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_cases import ByteTokenizer, ChatML, loader_of, section, sequences_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.train.data.answers import find_answers
from fivefold.engines.train.data.documents import ChatDocument, TextDocument
from fivefold.engines.train.data.encode import Encoded, Encoder, token_dtype
from fivefold.engines.train.data.prepare import prepare
from fivefold.engines.train.data.shards import TokenizedSource

EOS = 256
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)


def source_of(path: Path, cache: Path, tokenizer: ByteTokenizer, **more: object) -> TokenizedSource:
    return prepare(section(path, cache, **more), tokenizer, progress=False).sources[0]


def documents_of(source: TokenizedSource) -> list[tuple[list[int], list[bool]]]:
    found = []
    for start, length in zip(source.starts, source.lengths, strict=True):
        index = np.arange(start, start + length)
        learnt = source.learnt_at(index)
        mask = [True] * int(length) if learnt is None else learnt.tolist()
        found.append((source.tokens_at(index).tolist(), mask))
    return found


def learnt_text(tokenizer: ByteTokenizer, document: tuple[list[int], list[bool]]) -> list[str]:
    """The runs of learnt tokens, as text."""
    ids, mask = document
    runs, run = [], []
    for token, learnt in [*zip(ids, mask, strict=True), (0, False)]:
        if learnt:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_every_document_ends_with_one_end_of_text(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    texts = ["plain", "ends by itself<|endoftext|>", "ünïcode 漢字 🙂", " spaces \n\n"]
    path = jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts] + [{"text": ""}])
    source = source_of(path, tmp_path / "cache", tokenizer)
    assert source.manifest.empty_records == 1
    for (ids, _), text in zip(documents_of(source), texts, strict=True):
        assert ids[-1] == EOS and EOS not in ids[:-1]
        assert tokenizer.decode(ids[:-1]) == text.removesuffix("<|endoftext|>")


def test_of_pairs_only_the_answer_is_learnt(tmp_path: Path, shared_data: Path) -> None:
    tokenizer = ByteTokenizer()
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()[:50]
    records = [json.loads(line) for line in lines]
    path = jsonl(tmp_path / "a.jsonl", records)
    source = source_of(path, tmp_path / "cache", tokenizer, prompt="question", completion="answer")
    for document, record in zip(documents_of(source), records, strict=True):
        assert (
            tokenizer.decode(document[0]) == record["question"] + record["answer"] + "<|endoftext|>"
        )
        assert learnt_text(tokenizer, document) == [record["answer"] + "<|endoftext|>"]


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_of_a_chat_only_answers_and_their_ends_are_learnt(turns: list[tuple[str, str]]) -> None:
    tokenizer = ByteTokenizer(ChatML())
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    ((ids, mask),) = Encoder(tokenizer)._encode_chats([ChatDocument("here", messages)])
    expected = [f"{answer}<|im_end|>" for _, answer in turns if answer]
    assert learnt_text(tokenizer, (ids, [bool(m) for m in mask])) == expected
    assert tokenizer.decode(ids) == ChatML().render(messages, False) + "<|endoftext|>"


def test_real_instructions_as_a_chat(tmp_path: Path, shared_data: Path) -> None:
    tokenizer = ByteTokenizer(ChatML())
    tasks = [
        json.loads(x)
        for x in (shared_data / "instructions" / "seed_tasks.jsonl").read_text("utf-8").splitlines()
    ]
    records = [
        {"messages": [{"role": "user", "content": t["instruction"]}, {"role": "assistant", "content": t["instances"][0]["output"]}]}
        for t in tasks
    ]  # fmt: skip
    source = source_of(jsonl(tmp_path / "a.jsonl", records), tmp_path / "cache", tokenizer)
    assert source.manifest.form == "chat"
    for document, record in zip(documents_of(source), records, strict=True):
        answer = record["messages"][1]["content"]
        assert learnt_text(tokenizer, document) == ([f"{answer}<|im_end|>"] if answer else [])


def test_labels_of_a_packed_chat_are_the_answers(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(ChatML())
    records = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}"}]}
        for i in range(9)
    ]  # fmt: skip
    config = section(jsonl(tmp_path / "a.jsonl", records), tmp_path / "c", evaluation_share=0)
    loader = loader_of(
        prepare(config, tokenizer, progress=False), shuffle=False, sequence_length=32
    )
    rows = sequences_of(loader.batches(0, loader.sequences))
    labels = [label for row in rows for label in row[1] if label != -100]
    assert tokenizer.decode(labels) == "".join(f"answer {i}<|im_end|>" for i in range(9))


class Thoughtful:
    """A template in the manner of Qwen3: strips contents, drops the thoughts of earlier turns."""

    def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        text = ""
        for index, message in enumerate(messages):
            content = message["content"].strip()
            if message["role"] == "assistant":
                thought, _, content = content.rpartition("</think>")
                if index == len(messages) - 1:
                    content = f"<think>\n{thought.removeprefix('<think>').strip()}\n</think>\n\n{content.strip()}"
                else:
                    content = content.strip()
            text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
        return text


def test_answers_are_found_where_a_template_rewrites_them() -> None:
    messages = [
        {"role": "user", "content": " one "},
        {"role": "assistant", "content": "<think>hm</think> first answer "},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>well</think> last answer"},
    ]
    text, answers = find_answers(Thoughtful(), messages)  # type: ignore[arg-type]
    assert [text[a:b] for a, b in answers] == ["first answer", "well\n</think>\n\nlast answer"]


def test_an_answer_ends_where_the_template_goes_on() -> None:
    class Counting:
        """Writes after each message how long it was: text that differs, and is no answer's end."""

        def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
            return "".join(f"{m['content']} [{len(m['content'])} letters]\n" for m in messages)

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 1234}]
    text, ((start, stop),) = find_answers(Counting(), messages)  # type: ignore[arg-type]
    # All that depends on the answer is taken for it; what follows is not.
    assert text[start:stop] == "x" * 1234 + " [1234"
    assert text[stop:] == " letters]\n"


def test_without_an_end_of_turn_the_end_of_text_is_learnt(tmp_path: Path) -> None:
    class Plain:
        def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
            return "\n".join(m["content"] for m in messages)

    tokenizer = ByteTokenizer(Plain())
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    source = source_of(jsonl(tmp_path / "a.jsonl", [record]), tmp_path / "cache", tokenizer)
    assert learnt_text(tokenizer, documents_of(source)[0]) == ["a<|endoftext|>"]


def test_a_token_that_reaches_into_the_answer_is_learnt() -> None:
    class Joined:
        ids = (1, 2, 3)
        offsets = ((0, 2), (2, 5), (5, 6))

    _, mask = Encoder(ByteTokenizer())._pair(Joined(), TextDocument("here", "abcdef", 4))
    assert mask == [0, 1, 1, 1]


@pytest.mark.parametrize("size", [65536, 65537])
def test_the_smallest_type_holds_the_largest_token(size: int) -> None:
    assert np.iinfo(token_dtype(size)).max >= size - 1
    assert token_dtype(65536) is np.uint16


def test_encoded_tasks_pass_through_files_unchanged(tmp_path: Path) -> None:
    one = Encoded(
        np.arange(6, dtype=np.uint32), np.array([2, 4]), np.array([7, 2**63], np.uint64),
        np.array([0, 1, 0, 1, 1, 1], np.uint8), 3,
    )  # fmt: skip
    one.save(tmp_path / "x.npz")
    other = Encoded.load(tmp_path / "x.npz")
    for name in ("tokens", "lengths", "hashes", "learnt"):
        assert (getattr(one, name) == getattr(other, name)).all()
        assert getattr(one, name).dtype == getattr(other, name).dtype
    assert other.empty == 3
