"""What the detokenizer gives piece by piece is what `decode` gives as a whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_cases import (
    MULTILINGUAL,
    byte_level_tokenizer,
    llama3_style_tokenizer,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from fivefold.text.detokenizer import Detokenizer
from fivefold.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MAKERS = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "sentencepiece_without_prefix": lambda: sentencepiece_tokenizer(add_space_prefix=False),
    "llama3": llama3_style_tokenizer,
}


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("maker", MAKERS)
@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=TEXTS)
@example(text="👩‍👩‍👧‍👦")
@example(text="  two spaces, one at the end ")
@example(text="\ufffd is a character, too \ufffd")
@example(text="▁ is one as well")
def test_any_text_comes_out_whole_and_without_half_characters(maker: str, text: str) -> None:
    tokenizer = MAKERS[maker]()
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)
    # SentencePiece spells its space with ▁, so that one is lost; special tokens are left out.
    if "▁" not in text and not tokenizer.special_ids & set(tokenizer.encode(text, False)):
        assert "".join(pieces) == text


@pytest.mark.parametrize("text", MULTILINGUAL)
def test_smollm2_streams_real_text(text: str) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(text)
    for skip in (True, False):
        pieces = stream(tokenizer, ids, skip_special=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
        assert REPLACEMENT not in "".join(pieces)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_byte_level_ids_in_any_order_equal_decode(ids: list[int]) -> None:
    """Also where they make no UTF-8: the same number of U+FFFD in the same places."""
    tokenizer = byte_level_tokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ids=st.lists(st.integers(0, 320), max_size=30))
def test_sentencepiece_ids_in_any_order_equal_decode_where_it_is_text(ids: list[int]) -> None:
    tokenizer = sentencepiece_tokenizer()
    whole = tokenizer.decode(ids)
    streamed = "".join(stream(tokenizer, ids))
    # A damaged run of bytes spoils its valid neighbours in `decode`, which a stream has given out.
    assert streamed == whole or (REPLACEMENT in whole and REPLACEMENT in streamed)


def test_a_character_is_held_back_until_its_last_byte() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("€", add_special=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert stream(tokenizer, ids) == ["", "", "", "€", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("𐎀")[:2]
    assert "".join(stream(tokenizer, ids)[:-1]) == ""
    assert stream(tokenizer, ids)[-1] == REPLACEMENT == tokenizer.decode(ids)


def test_special_tokens_are_left_out_or_spelled() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b")
    assert stream(tokenizer, ids) == ["a", "", "b", ""]
    assert stream(tokenizer, ids, skip_special=False) == ["a", "<|im_end|>", "b", ""]


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("the ball") + tokenizer.encode("the day")
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "the ball the day"
    ids = [tokenizer.eos_ids[0], *tokenizer.encode("ball", add_special=False)]
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "</s> ball"


@pytest.mark.parametrize("decoder", ["metaspace", "wordpiece", "none"])
@settings(deadline=None, derandomize=True, max_examples=100)
@given(words=st.lists(st.sampled_from(["the", "ball", "un", "##able", ",", "日本"]), max_size=8))
def test_other_decoders_are_streamed_by_comparing(decoder: str, words: list[str]) -> None:
    vocabulary = ["[UNK]", "the", "ball", "un", "##able", ",", "日本", "▁the", "▁ball"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder == "metaspace":
        backend.decoder = decoders.Metaspace()
    elif decoder == "wordpiece":
        backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.spelling is None
    ids = [vocabulary.index(f"▁{w}" if f"▁{w}" in vocabulary else w) for w in words]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_other_decoders_hold_back_half_characters() -> None:
    """Bytes, in a pipeline that is not recognized as SentencePiece's."""
    vocabulary = ["[UNK]", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "[UNK]"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.spelling is None
    ids = [1, *(byte + 2 for byte in "é日😀".encode()), 1]
    assert stream(tokenizer, ids) == ["a", "", "é", "", "", "日", "", "", "", "😀", "a", ""]
    assert stream(tokenizer, ids[:-2])[-1] != ""  # an unfinished one comes out at the end
