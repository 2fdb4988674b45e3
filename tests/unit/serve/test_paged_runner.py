"""Mixed steps over a paged cache, planned by hand, give what the plain decoder gives."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.cache import PagedCache, bytes_per_block
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.engines.serve.scheduling.plan import Chunk, StepPlan
from fivefold.engines.serve.scheduling.sequence import Sequence
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from tests.parity.small_models import build
from tests.parity.test_same_bits import FAMILIES, SIZES


def poisoned_cache(decoder: Decoder, blocks: int, size: int, dtype: torch.dtype) -> PagedCache:
    cache = PagedCache(decoder.config, blocks, size, dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence(id=number, tokens=tokens, prompt_length=len(tokens), max_tokens=1)


def expected(decoder: Decoder, tokens: list[int]) -> Tensor:
    ids = torch.tensor([tokens])
    places = torch.arange(len(tokens)).unsqueeze(0)
    with torch.no_grad():
        return decoder.logits(decoder(ids, places, CausalAttention()))[0]


def run_in_chunks(
    runner: PagedRunner, sequences: list[Sequence], draw: random.Random
) -> list[list[tuple[int, Tensor]]]:
    """Compute all tokens in random mixed steps; (place, logits) of every chunk's end."""
    free = list(range(runner.cache.num_blocks))
    draw.shuffle(free)
    found: list[list[tuple[int, Tensor]]] = [[] for _ in sequences]
    while True:
        left = [s for s in sequences if s.remaining]
        if not left:
            return found
        chunks = []
        for each in draw.sample(left, draw.randint(1, len(left))):
            count = draw.choice([1, draw.randint(1, each.remaining)])
            count = min(count, each.remaining)
            while len(each.block_table) * runner.cache.block_size < each.computed + count:
                each.block_table.append(free.pop())
            chunks.append(Chunk(each, each.computed, count, draw.random() < 0.7))
        logits = runner.step(StepPlan(tuple(chunks)))
        sampled = [c for c in chunks if c.samples]
        assert logits.shape[0] == len(sampled)
        for chunk, row in zip(sampled, logits, strict=True):
            found[chunk.sequence.id].append((chunk.start + chunk.count - 1, row))
        for chunk in chunks:
            chunk.sequence.computed += chunk.count


@pytest.mark.parametrize("kind", ["llama", "llama-biased", "mistral", "qwen3", "gemma3"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_mixed_steps_equal_the_plain_decoder(kind: str, size: int) -> None:
    _, decoder = build(kind)
    draw = random.Random(size)
    rows = [[draw.randrange(3, 199) for _ in range(n)] for n in (31, 5, 1, 18)]
    runner = PagedRunner(decoder, poisoned_cache(decoder, -(-80 // size) + 4, size, torch.float32))
    found = run_in_chunks(runner, [sequence(i, t) for i, t in enumerate(rows)], draw)
    for tokens, ends in zip(rows, found, strict=True):
        whole = expected(decoder, tokens)
        for place, logits in ends:
            torch.testing.assert_close(logits, whole[place], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_and_latent_attention(family: str) -> None:
    decoder = Decoder(parse_config({"model_type": family, **SIZES, **FAMILIES[family]}))
    decoder.initialize(0)
    draw = random.Random(0)
    rows = [[draw.randrange(131) for _ in range(n)] for n in (40, 7)]
    runner = PagedRunner(decoder, poisoned_cache(decoder, 20, 4, torch.float32))
    found = run_in_chunks(runner, [sequence(i, t) for i, t in enumerate(rows)], draw)
    for tokens, ends in zip(rows, found, strict=True):
        for place, logits in ends:
            torch.testing.assert_close(
                logits, expected(decoder, tokens)[place], rtol=2e-4, atol=2e-4
            )


def test_the_batch_by_hand() -> None:
    _, decoder = build("llama")
    cache = poisoned_cache(decoder, 9, 4, torch.float32)
    one, two = sequence(0, list(range(100, 110))), sequence(1, [7, 8, 9])
    one.block_table, two.block_table = [5, 2, 8], [3]
    plan = StepPlan((Chunk(two, 2, 1, True), Chunk(one, 3, 6, False)))
    batch = PagedBatch.of(plan, cache)
    assert batch.tokens.tolist() == [9, 103, 104, 105, 106, 107, 108]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert batch.slots.tolist() == [3 * 4 + 2, 5 * 4 + 3, 8, 9, 10, 11, 8 * 4]
    assert batch.block_table.tolist() == [[3, 0, 0], [5, 2, 8]]
    assert batch.query_starts.tolist() == [0, 1, 7]
    assert batch.lengths.tolist() == [3, 9]
    assert batch.rows.tolist() == [0]
    assert PagedBatch.of(plan, cache, {0}).rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert PagedBatch.of(plan, cache, {1}).rows.tolist() == [0]
    for tensor in (batch.block_table, batch.query_starts, batch.lengths):
        assert tensor.dtype == torch.int32


def test_copies_read_before_they_write() -> None:
    _, decoder = build("llama")
    cache = PagedCache(decoder.config, 5, 2, torch.float32)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.arange(5.0).view(-1, 1, 1, 1).expand_as(tensor))
    cache.copy_blocks([(0, 3), (1, 0), (3, 4)])
    for tensor in (*cache.keys, *cache.values):
        assert tensor[:, 0, 0, 0].tolist() == [1, 1, 2, 0, 3]
    cache.copy_blocks([])


def test_a_forked_sequence_goes_on_from_copies() -> None:
    """Two sequences share a prompt; the last block is copied, then both write their own."""
    _, decoder = build("llama")
    runner = PagedRunner(decoder, poisoned_cache(decoder, 8, 4, torch.float32))
    prompt = [5, 9, 11, 60, 70, 80]
    one = sequence(0, prompt)
    one.block_table = [4, 6]
    runner.step(StepPlan((Chunk(one, 0, 6, True),)))
    one.tokens = [*prompt, 21]
    two = sequence(1, [*prompt, 33])
    two.block_table = [4, 1]
    plan = StepPlan((Chunk(one, 6, 1, True), Chunk(two, 6, 1, True)), copies=((6, 1),))
    logits = runner.step(plan)
    for row, tokens in zip(logits, (one.tokens, two.tokens), strict=True):
        torch.testing.assert_close(row, expected(decoder, tokens)[-1], rtol=2e-4, atol=2e-4)


def test_a_cache_in_bf16_under_a_model_in_fp32() -> None:
    _, decoder = build("llama")
    runner = PagedRunner(decoder, poisoned_cache(decoder, 8, 4, torch.bfloat16))
    one = sequence(0, [5, 9, 11, 60, 70, 80])
    one.block_table = [4, 6]
    logits = runner.step(StepPlan((Chunk(one, 0, 6, True),)))
    whole = expected(decoder, one.tokens)[-1:]
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, whole)
    # bf16 has 8 bits: logits of this wide model reach 20
    assert (logits - whole).abs().max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_per_block(dtype: torch.dtype) -> None:
    decoder = Decoder(
        parse_config({"model_type": "deepseek_v3", **SIZES, **FAMILIES["deepseek_v3"]})
    )
    cache = PagedCache(decoder.config, 3, 8, dtype)
    held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert held == 3 * bytes_per_block(decoder.config, 8, dtype)


def test_all_rows_of_a_sequence_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from fivefold.engines.serve.paged import runner as module

    monkeypatch.setattr(module, "HEAD_ROWS", 4)
    _, decoder = build("llama")
    runner = PagedRunner(decoder, poisoned_cache(decoder, 8, 4, torch.float32))
    one = sequence(0, [5, 9, 11, 60, 70, 80])
    one.block_table = [4, 6]
    hidden = runner.hidden(StepPlan((Chunk(one, 0, 6, False),)), whole={0})
    logits = torch.cat(list(runner.logits_in_pieces(hidden)))
    torch.testing.assert_close(logits, expected(decoder, one.tokens), rtol=2e-4, atol=2e-4)
