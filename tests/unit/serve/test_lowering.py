"""The packed decode step is the modules' own, faster: same logits, same cache, same parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fivefold.engines.serve.lowering import lower
from fivefold.engines.serve.runner import ModelRunner
from fivefold.kernels import split_linear
from fivefold.model.cache import KVCache
from fivefold.model.decoder import Decoder
from tests.parity.small_models import KINDS, build

LOWERED = [kind for kind in KINDS if kind != "llama-dynamic"]
ALONE, UNIFORM, RAGGED = [11], [11, 11], [3, 17, 1, 9]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """With two, few fp32 rows take another product."""
    monkeypatch.setattr(split_linear, "LEAST_ELEMENTS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decode(runner: ModelRunner, lengths: list[int], steps: int) -> tuple[torch.Tensor, KVCache]:
    """[steps,B,V] logits of fixed tokens after random prompts."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 199, (n,), generator=rng).tolist() for n in lengths]
    cache = runner.new_cache(len(lengths), max(lengths) + 2)
    runner.prefill(cache, prompts)
    tokens = torch.randint(3, 199, (steps, len(lengths)), generator=rng).tolist()
    return torch.stack([runner.decode(cache, step) for step in tokens]), cache


def both(
    decoder: Decoder, lengths: list[int], steps: int = 6
) -> list[tuple[torch.Tensor, KVCache]]:
    runner = ModelRunner(decoder)
    assert runner.lowered is not None
    lowered = decode(runner, lengths, steps)
    runner.lowered = None
    return [lowered, decode(runner, lengths, steps)]


# A few fp32 roundings: products and norms add in other orders than the modules' do.
NEAR = {"rtol": 1e-5, "atol": 3e-5}


@pytest.mark.parametrize("lengths", [ALONE, UNIFORM, RAGGED], ids=["alone", "uniform", "ragged"])
@pytest.mark.parametrize("kind", LOWERED)
def test_fp32_logits_and_cache_equal_the_modules(
    kind: str, lengths: list[int], threads: int
) -> None:
    _, decoder = build(kind)
    (fast, fast_cache), (slow, slow_cache) = both(decoder, lengths)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=3e-5 * float(slow.std()))
    assert fast_cache.lengths == slow_cache.lengths
    for row, length in enumerate(fast_cache.lengths):
        for fast_keys, slow_keys in zip(fast_cache.keys, slow_cache.keys, strict=True):
            torch.testing.assert_close(fast_keys[row, :length], slow_keys[row, :length], **NEAR)
        for fast_values, slow_values in zip(fast_cache.values, slow_cache.values, strict=True):
            torch.testing.assert_close(fast_values[row, :length], slow_values[row, :length], **NEAR)


@pytest.mark.parametrize("lengths", [ALONE, RAGGED], ids=["alone", "ragged"])
@pytest.mark.parametrize("kind", LOWERED)
def test_bf16_is_no_further_from_fp32_than_the_modules_are(kind: str, lengths: list[int]) -> None:
    """Rounding differs only in a lone row's residual, which its product adds before rounding."""
    _, decoder = build(kind, initializer_range=0.08)
    (_, _), (exact, _) = both(decoder, lengths)
    (fast, _), (slow, _) = both(decoder.to(torch.bfloat16), lengths)
    error, allowed = (fast - exact).norm(), (slow - exact).norm()
    assert error < 1.25 * allowed + 1e-3 * exact.norm()


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3"])
def test_matrices_are_shared_not_copied(kind: str) -> None:
    _, decoder = build(kind)
    names = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    before = sum(p.numel() for p in decoder.parameters())
    lowered = lower(decoder)
    assert lowered is not None
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, names[name])
    block, packed = decoder.layers[0], lowered.layers[0]
    assert packed.query_key_value.weight.data_ptr() == block.attention.query.weight.data_ptr()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in decoder.parameters()}
    assert sum(s.nbytes() for s in storages.values()) == 4 * before
    with torch.no_grad():
        block.attention.value.weight.fill_(0.5)
        block.feed_forward.up.weight.zero_()
    (fast, _), (slow, _) = both(decoder, RAGGED)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-4)


def test_lowering_twice_shares_the_first_packing() -> None:
    _, decoder = build("llama-biased")
    first, second = lower(decoder), lower(decoder)
    assert first is not None and second is not None
    for a, b in zip(first.layers, second.layers, strict=True):
        for mine, its in ((a.query_key_value, b.query_key_value), (a.gate_up, b.gate_up)):
            for x, y in ((mine.weight, its.weight), (mine.bias, its.bias)):
                assert x is not None and y is not None
                assert (x.data_ptr(), x.shape) == (y.data_ptr(), y.shape)


class Adapter(nn.Module):
    """Stands for whatever someone wraps a projection in."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def test_what_is_not_covered_runs_through_the_modules() -> None:
    for kind, change in (
        (
            "llama",
            lambda d: setattr(d.layers[1].attention, "query", Adapter(d.layers[1].attention.query)),
        ),
        ("llama", lambda d: d.layers[0].register_forward_hook(lambda *_: None)),
        ("llama", lambda d: d.layers[0].attention.register_forward_pre_hook(lambda *_: None)),
        ("llama-dynamic", lambda d: None),
    ):
        _, decoder = build(kind)
        change(decoder)
        assert lower(decoder) is None
        assert ModelRunner(decoder).lowered is None
    assert lower(Decoder(decoder.config, device="meta")) is None
