"""Packed documents, caches fed in pieces: each equals the plain forward of one document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import FAMILIES, decoder, families, held, logits, tokens
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.model.attention_backend import CausalAttention, PackedAttention
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.decoder import Decoder

# Sums over keys run in another order, or over more (zero) terms: a few fp32 roundings of logits
# of a few units, through three layers.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
MODELS = {family: decoder(family) for family in FAMILIES}


def packed(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(documents, positions) [B,S] of rows of document lengths, padded to the longest row."""
    width = max(sum(lengths) for lengths in rows)
    documents, places = torch.full((len(rows), width), -1), torch.zeros(len(rows), width).long()
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = number
            places[row, start : start + length] = torch.arange(length)
            start += length
    return documents, places


rows_drawn = st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=4), min_size=1, max_size=3)


@held
@given(families, rows_drawn)
@torch.no_grad()
def test_packed_documents_equal_each_alone(family: str, rows: list[list[int]]) -> None:
    model = MODELS[family]
    documents, places = packed(rows)
    ids = tokens(*documents.shape, seed=1)
    together = model.logits(model(ids, places, PackedAttention(documents)))
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = logits(model, ids[row : row + 1, part])
            torch.testing.assert_close(together[row : row + 1, part], alone, **CLOSE)
            start += length
    assert together.isfinite().all()  # padding included


@held
@given(families, rows_drawn)
def test_gradients_do_not_cross_documents(family: str, rows: list[list[int]]) -> None:
    model = MODELS[family]
    documents, places = packed(rows)
    inputs: list[Tensor] = []
    hook = model.embedding.register_forward_hook(
        lambda _m, _i, out: inputs.append(out) or out.retain_grad()
    )
    hidden = model(tokens(*documents.shape), places, PackedAttention(documents))
    hook.remove()
    hidden[0, 0].sum().backward()
    assert inputs[0].grad is not None
    assert not inputs[0].grad[0, 1:].any()
    assert not inputs[0].grad[1:].any()
    model.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_a_row_equals_causal(family: str) -> None:
    model = MODELS[family]
    ids = tokens(2, 13)
    one = PackedAttention(torch.zeros_like(ids))
    torch.testing.assert_close(logits(model, ids, one), logits(model, ids), **CLOSE)


def test_masks_are_built_once_a_window() -> None:
    model = MODELS["gemma3_text"]
    documents, places = packed([[4, 5]])
    attention = PackedAttention(documents)
    built: list[int | None] = []
    build = attention._build
    attention._build = lambda window: built.append(window) or build(window)  # type: ignore[method-assign]
    with dispatch.only("torch"):
        model(tokens(1, 9), places, attention)
    assert built == [4, None]


def test_one_causal_backend_serves_any_length() -> None:
    model, attention = MODELS["mistral"], CausalAttention()
    for length in (9, 6, 12):
        ids = tokens(1, length)
        torch.testing.assert_close(logits(model, ids, attention), logits(model, ids))


def feed(model: Decoder, cache: KVCache, ids: Tensor, counts: list[int] | None = None) -> Tensor:
    """Logits of the next tokens; rows of fewer than S (`counts`) are padded at their end."""
    width = ids.shape[1]
    hidden = model(ids, cache.positions(width), CachedAttention(cache))
    cache.advance(counts or [width] * ids.shape[0])
    return model.logits(hidden)


@held
@given(
    families,
    st.integers(1, 3),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(0, 5),
)
@torch.no_grad()
def test_a_cache_fed_in_pieces_equals_the_whole(
    family: str, batch: int, pieces: list[int], spare: int
) -> None:
    model = MODELS[family]
    ids = tokens(batch, sum(pieces), seed=2)
    cache = KVCache(model.config, batch, ids.shape[1] + spare, dtype=torch.float32)
    found = torch.cat([feed(model, cache, piece) for piece in ids.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(found, logits(model, ids), **CLOSE)
    assert cache.lengths == [ids.shape[1]] * batch


@held
@given(
    families,
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=5),
    st.integers(1, 6),
)
@torch.no_grad()
def test_rows_of_different_lengths_equal_each_alone(
    family: str, steps: list[list[int]], first: int
) -> None:
    """Two rows that get different numbers of tokens at each step."""
    model = MODELS[family]
    steps = [[first, 1], *steps]
    texts = [tokens(1, sum(step[row] for step in steps), seed=row)[0] for row in (0, 1)]
    cache = KVCache(model.config, 2, 40, dtype=torch.float32)
    found: list[list[Tensor]] = [[], []]
    for counts in steps:
        width = max(counts)
        if width == 0:
            continue
        ids = torch.full((2, width), 7)  # padding is a real token: it must not be seen
        for row in (0, 1):
            held_before = cache.lengths[row]
            ids[row, : counts[row]] = texts[row][held_before : held_before + counts[row]]
        scores = feed(model, cache, ids, counts)
        for row in (0, 1):
            found[row].append(scores[row, : counts[row]])
    for row in (0, 1):
        alone = logits(model, texts[row].unsqueeze(0))[0]
        torch.testing.assert_close(torch.cat(found[row]), alone, **CLOSE)


@held
@given(families, st.integers(1, 8), st.integers(1, 8), st.integers(0, 8))
@torch.no_grad()
def test_truncating_forgets(family: str, before: int, wrong: int, keep: int) -> None:
    """What was decoded wrongly and cut off leaves no trace, as in speculative decoding."""
    model = MODELS[family]
    keep = min(keep, before)
    ids, other = tokens(1, 20, seed=3), tokens(1, wrong, seed=4)
    cache = KVCache(model.config, 1, 40, dtype=torch.float32)
    feed(model, cache, ids[:, :before])
    feed(model, cache, other)
    cache.truncate([keep])
    found = feed(model, cache, ids[:, keep:])
    torch.testing.assert_close(found, logits(model, ids)[:, keep:], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_may_leave_and_room_may_grow(family: str) -> None:
    model = MODELS[family]
    ids = tokens(3, 18, seed=5)
    cache = KVCache(model.config, 3, 10, dtype=torch.float32)
    feed(model, cache, ids[:, :9])
    cache.keep([2, 0])
    cache.reserve(18)
    assert cache.capacity == 18
    found = feed(model, cache, ids[[2, 0], 9:])
    torch.testing.assert_close(found, logits(model, ids)[[2, 0], 9:], **CLOSE)
    cache.reserve(5)
    assert cache.capacity == 18


def test_the_cache_is_allocated_once_in_its_format() -> None:
    model = decoder("qwen3", dtype=torch.bfloat16)
    cache = KVCache(model.config, 2, 12, dtype=torch.bfloat16)
    where = [t.data_ptr() for t in (*cache.keys, *cache.values)]
    with torch.no_grad():
        for piece in tokens(2, 12).split(4, dim=1):
            feed(model, cache, piece)
    assert where == [t.data_ptr() for t in (*cache.keys, *cache.values)]
    assert {t.dtype for t in cache.keys} == {torch.bfloat16}
    assert cache.keys[0].shape == (2, 12, 2, 8)
