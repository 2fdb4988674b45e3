"""What prompts are made of: wanted lengths, equal beginnings for equal parts, real words."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.load.common_words import COMMON_WORDS
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.material import TokenIds, Words, common_words, words_of
from fivefold.engines.serve.load.workload import from_file, made_up

PARTS = st.lists(
    st.tuples(st.sampled_from(["own", "block"]), st.integers(0, 3), st.integers(1, 40)),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=80)
@given(PARTS, st.integers(1, 300), st.integers(0, 2**31))
def test_ids_are_as_many_as_wanted_and_in_the_vocabulary(
    parts: list[tuple[str, int, int]], vocabulary: int, seed: int
) -> None:
    ids = TokenIds(vocabulary, seed).prompt(parts)
    assert len(ids) == sum(count for _, _, count in parts)
    assert all(0 <= token < vocabulary for token in ids)
    assert ids == TokenIds(vocabulary, seed).prompt(parts)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99), st.integers(2, 60_000))
def test_a_shorter_part_begins_the_longer(a: int, b: int, id: int, vocabulary: int) -> None:
    low, high = sorted((a, b))
    for material in (TokenIds(vocabulary, 3), Words(3, common_words)):
        long, short = (material.prompt([("block", id, n)]) for n in (high, low))
        long, short = (p.split() if isinstance(p, str) else p for p in (long, short))
        assert long[:low] == short


def test_other_seeds_kinds_and_ids_are_other_prompts() -> None:
    prompts = {
        tuple(TokenIds(1000, seed).prompt([(kind, id, 20)]))
        for seed in range(5) for kind in ("own", "prefix", "block") for id in range(5)
    }  # fmt: skip
    assert len(prompts) == 75


def test_special_tokens_are_mostly_left_out() -> None:
    assert min(TokenIds(1000, 0).prompt([("own", 0, 5000)])) == 32
    assert min(TokenIds(100, 0).prompt([("own", 0, 5000)])) == 0


def test_words_follow_what_the_server_counts() -> None:
    words = Words(0, common_words).calibrated((32, 7 + 48), (160, 7 + 240))  # 1.5 a word, 7 around
    assert words.per_token == pytest.approx(1 / 1.5) and words.overhead == 7
    prompt = words.prompt([("prefix", 0, 150), ("own", 1, 157)])
    assert len(prompt.split()) == 200
    assert words.prompt([("own", 0, 3)]).count(" ") == 0  # one word, if the template takes all
    with pytest.raises(LoadError, match="counts 50 tokens for 32 words, but 50 for 160"):
        Words(0, common_words).calibrated((32, 50), (160, 50))


def test_words_of_a_text_are_runs_of_it(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{i}" for i in range(50)))
    words = Words(4, words_of(path)).prompt([("own", 0, 120)]).split()
    numbers = [int(word[1:]) for word in words]
    assert all((b - a) % 50 == 1 for a, b in itertools.pairwise(numbers))
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, wanted in (("empty", "holds no word"), ("none", "No such file"), ("binary", "UTF-8")):
        with pytest.raises(LoadError, match=wanted):
            words_of(tmp_path / name)


def test_common_words_are_plain() -> None:
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS) > 250
    assert all(word.isascii() and word.isalpha() and word.islower() for word in COMMON_WORDS)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 50), st.integers(2, 900), st.integers(1, 300), st.floats(0, 0.99), st.data())
def test_lengths_lie_in_the_spread(
    count: int, tokens: int, output: int, spread: float, data: st.DataObject
) -> None:
    shared = data.draw(st.integers(0, tokens - 1))
    asked = made_up(count, tokens, output, spread=spread, shared_prefix=shared, prefixes=3)
    assert len(asked) == count
    for each in asked:
        own = each.parts[-1][2]
        assert own >= 1 and abs(own - (tokens - shared)) <= spread * (tokens - shared) + 1e-9
        assert 1 <= each.output_tokens <= max(1, output * (1 + spread))
        assert len(each.parts) == (2 if shared else 1)
        assert each.input_tokens == shared + own


def test_fixed_lengths_and_a_shared_prefix() -> None:
    asked = made_up(40, 544, 32, shared_prefix=512, prefixes=2, seed=1)
    assert {(a.input_tokens, a.output_tokens) for a in asked} == {(544, 32)}
    prompts = [TokenIds(1000, 0).prompt(a.parts) for a in asked]
    assert len({tuple(p[:512]) for p in prompts}) == 2
    assert len({tuple(p[512:]) for p in prompts}) == 40
    with pytest.raises(LoadError, match="a shared prefix of 32 in prompts of 32 tokens"):
        made_up(1, 32, 1, shared_prefix=32)
    with pytest.raises(LoadError, match=r"a spread of 1\.0"):
        made_up(1, 32, 1, spread=1.0)


def test_texts_of_a_file(tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("one\n\ntwo words\n")
    lines.write_text('{"prompt": "a", "output_tokens": 5}\n{"prompt": "b"}\n')
    assert [a.text for a in from_file(plain, 3, 7)] == ["one", "two words", "one"]
    assert [(a.text, a.output_tokens) for a in from_file(lines, 2, 7)] == [("a", 5), ("b", 7)]
    assert from_file(plain, 1, 7)[0].input_tokens is None


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{", "line 1 is not JSON"),
        ("{}", "line 1 has no text under `prompt`"),
        ('{"prompt": ""}', "line 1 has no text"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1 has output_tokens 0"),
        ("", "holds no prompt"),
    ],
)
def test_files_of_texts_that_are_wrong(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(LoadError, match=wanted):
        from_file(path, 1, 1)
    with pytest.raises(LoadError, match="No such file"):
        from_file(tmp_path / "absent", 1, 1)
