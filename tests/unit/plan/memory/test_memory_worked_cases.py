"""Worked cases: 7B's state, Llama-2-7B's cache, 13B on four servers, and the published layouts."""

from __future__ import annotations

import pytest

from fivefold.core.errors import PlanError
from fivefold.core.layout import Layout
from fivefold.plan.hardware.catalogue import device
from fivefold.plan.memory.explain import (
    explain_cache,
    explain_parameters,
    explain_state,
    total_parameters,
)
from fivefold.plan.memory.ledger import ledger
from fivefold.plan.memory.serving import (
    element_bytes,
    kv_bytes,
    kv_bytes_per_token,
    weights_bytes,
)
from fivefold.plan.models.parse import shape
from fivefold.plan.software import FIVEFOLD, MEGATRON_CORE
from fivefold.plan.workload import Strategy, Training

GIB = 2**30


def test_7b_is_counted_and_does_not_train_on_80_gb() -> None:
    """hidden 4096, 32 heads, 32 layers, vocabulary 32000, feed-forward 11008."""
    model = shape("llama-2-7b")
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    wanted = 32 * layer + 2 * 32000 * 4096 + 4096
    assert total_parameters(model) == wanted == 6_738_415_616
    said = "\n".join(
        [*explain_parameters(model), *explain_state(model, device("A100-80GB").memory)]
    )
    assert "all parameters: 6,738,415,616" in said
    assert "attention.query.weight: 4,096 x 4,096 = 16,777,216" in said
    assert "16-bit weights: 2 x 6,738,415,616 = 13.48 GB" in said
    assert "Adam in mixed precision: (4 master + 4 + 4 moments) x 6,738,415,616 = 80.86 GB" in said
    assert "(2 + 2 + 12) x 6,738,415,616 = 107.81 GB" in said
    assert "does not hold the whole training state" in said
    (alone,) = ledger(model, Training(4096, 1), Strategy(Layout(), 1, "full"), MEGATRON_CORE)
    assert alone.parameters == 2 * wanted and alone.masters + alone.optimizer == 12 * wanted
    assert alone.states > device("A100-80GB").memory


def test_llama_2_7b_s_cache_is_32_gib() -> None:
    """2 x 32 heads x 128 x 2 bytes x 32 layers = 512 KiB a token; 16 x 4096 of them."""
    model, alone = shape("llama-2-7b"), Layout()
    assert kv_bytes_per_token(model, alone, "fp16") == 2 * 32 * 128 * 2 * 32 == 512 * 1024
    assert 16 * kv_bytes(model, alone, 4096, "fp16") == 32 * GIB
    assert 16 * kv_bytes(model, alone, 4096, "fp8") == 16 * GIB
    said = explain_cache(model, 4096, 16, "fp16")
    assert any("16 x 4,096 tokens: 34.36 GB (32 GiB) in fp16" in line for line in said)
    assert "with 8 key/value heads (GQA): 8 GiB" in said
    assert "with 4 key/value heads (GQA): 4 GiB" in said
    assert "with the cache in fp8: 16 GiB" in said
    assert "with the cache in nvfp4: 9 GiB" in said  # 16 elements share a scale of 8 bits


def test_caches_of_other_attention() -> None:
    grouped, latent = shape("llama-3.1-70b"), shape("deepseek-v3")
    assert kv_bytes_per_token(grouped, Layout()) == 2 * 8 * 128 * 2 * 80
    assert kv_bytes_per_token(grouped, Layout(tp=8)) == 2 * 128 * 2 * 80
    assert kv_bytes_per_token(grouped, Layout(tp=16)) == 2 * 128 * 2 * 80  # a copy
    assert kv_bytes_per_token(latent, Layout()) == (512 + 64) * 2 * 61
    assert kv_bytes_per_token(latent, Layout(tp=8)) == (512 + 64) * 2 * 61  # one latent for all
    windows = shape("gemma-3-27b")
    local = sum(w is not None for w in windows.config.windows)
    each = 2 * windows.config.num_kv_heads * windows.config.head_dim * 2
    window = next(w for w in windows.config.windows if w is not None)
    long = 64 * window
    wanted = each * (local * window + (windows.config.num_layers - local) * long)
    assert kv_bytes(windows, Layout(), long) == wanted


def test_weights_in_their_formats() -> None:
    model = shape("llama-3.1-70b")
    whole = weights_bytes(model, Layout())
    assert whole == 2 * total_parameters(model)
    assert weights_bytes(model, Layout(tp=8)) == pytest.approx(whole / 8, rel=0.001)
    # Matrices of layers, but embedding and head in 16 bits.
    ends = 2 * 2 * 128256 * 8192
    assert weights_bytes(model, Layout(), "fp8") == pytest.approx(
        (whole - ends) / 2 + ends, rel=1e-4
    )
    assert element_bytes("nvfp4") == 0.5625 and element_bytes("mxfp8") == 1.03125
    two = weights_bytes(model, Layout(pp=2))
    assert whole / 2 < two < 0.52 * whole
    tied = shape("llama-3.2-1b")
    assert weights_bytes(tied, Layout(pp=2)) > weights_bytes(tied, Layout()) / 2
    with pytest.raises(PlanError, match=r"no format 'fp7' .*did you mean 'fp8'"):
        weights_bytes(model, Layout(), "fp7")


def test_13b_holds_16_bytes_a_parameter() -> None:
    """TP4 PP2 DP4, micro-batch 4, 512 sequences: 32 accumulation steps."""
    model = shape("13B")
    training = Training(4096, 512)
    strategy = Strategy(Layout.parse("tp=4,pp=2,dp_replicate=4"), 4, "full")
    assert strategy.microbatches(training) == 32
    found = ledger(model, training, strategy, FIVEFOLD)
    assert sum(one.states for one in found) * 4 == pytest.approx(
        (2 + 4 + 12) * total_parameters(model), rel=0.001
    )
    from dataclasses import replace

    half = replace(FIVEFOLD, gradient_bytes=2)
    found = ledger(model, training, strategy, half)
    assert sum(one.states for one in found) * 4 == pytest.approx(
        16 * total_parameters(model), rel=0.001
    )
    assert max(one.total for one in found) < device("A100-80GB").memory


@pytest.mark.parametrize(
    ("model", "layout", "sequence", "batch", "name"),
    [
        # Llama 3 (2407.21783), table 4: 16,384 H100.
        ("llama-3.1-405b", "tp=8,pp=16,dp_shard=128", 8192, 2048, "H100"),
        ("llama-3.1-405b", "tp=8,cp=16,pp=16,dp_shard=8", 131072, 128, "H100"),
        # DeepSeek-V3 (2412.19437): PP16, EP64, ZeRO-1, 2,048 H800.
        ("deepseek-v3", "pp=16,dp_shard=128,ep=64,zero=1", 4096, 15360, "H800"),
    ],
)
def test_published_layouts_fit(
    model: str, layout: str, sequence: int, batch: int, name: str
) -> None:
    training = Training(sequence, batch)
    strategy = Strategy(Layout.parse(layout), 1, "full")
    found = ledger(shape(model), training, strategy, FIVEFOLD)
    assert len(found) == 16
    assert max(one.total for one in found) < device(name).memory
