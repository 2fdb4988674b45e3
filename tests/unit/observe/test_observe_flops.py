"""The FLOP formula against torch's own counter and against published figures."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fivefold.core.errors import ConfigError
from fivefold.engines.train.recorder import decoder_shape
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.observe.flops import (
    DecoderShape,
    attended_keys,
    decode_flops,
    forward_flops_per_token,
    hardware_flops_per_token,
    prefill_flops,
    training_flops_per_token,
)

SMALL = DecoderShape(
    num_layers=3, hidden_size=64, intermediate_size=160, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=320,
)  # fmt: skip
# Chowdhery et al. 2022, table 1; one key and value head for all, a gated feed-forward of 4 D.
PALM = DecoderShape(
    num_layers=118, hidden_size=18432, intermediate_size=73728, num_heads=48, num_kv_heads=1,
    head_dim=256, vocab_size=256_000,
)  # fmt: skip


def square_attention(query, key, value, **_):  # type: ignore[no-untyped-def]
    """Attention by plain products over the full square, so that the counter sees all of it."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1))
    return torch.matmul(scores, value.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_training_flops_equal_what_torch_counts(tied: bool) -> None:
    config = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    decoder = Decoder(parse_config(config))
    decoder.initialize(0)
    batch, length = 2, 24
    tokens = torch.randint(0, 320, (batch, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand_as(tokens)
    with FlopCounterMode(display=False) as counter:
        hidden = decoder(tokens, positions, square_attention)
        forward = counter.get_total_flops() + 2 * batch * length * SMALL.head_parameters
        decoder.logits(hidden).sum().backward()
    # Ours attends to (S + 1) / 2 keys where this one computes the whole square of S.
    rest = 12 * SMALL.num_layers * SMALL.num_heads * SMALL.head_dim
    rest *= length - attended_keys(length)
    assert forward == batch * length * (forward_flops_per_token(SMALL, length) + rest / 3)
    assert counter.get_total_flops() == batch * length * (
        training_flops_per_token(SMALL, length) + rest
    )


def test_palm_540b_as_published() -> None:
    """Appendix B: 238.3K tokens/s on 6144 chips of 275 TFLOP/s is an MFU of 46.2%, uncausal."""
    assert PALM.matrix_parameters == pytest.approx(540.35e9, rel=1e-4)
    whole_square = 12 * PALM.num_layers * PALM.num_heads * PALM.head_dim * 2048
    per_token = 6 * PALM.matrix_parameters + whole_square
    assert 238.3e3 * per_token / (6144 * 275e12) == pytest.approx(0.462, abs=5e-4)
    ours = training_flops_per_token(PALM, 2048)
    halved = 6 * PALM.matrix_parameters + whole_square / 2
    assert ours == pytest.approx(halved, rel=1e-4)  # the diagonal is all that differs


@pytest.mark.parametrize("window", [None, 1, 5, 24, 100])
def test_attended_keys_equal_a_count(window: int | None) -> None:
    mask = torch.ones(24, 24).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    assert attended_keys(24, window) == pytest.approx(float(mask.sum()) / 24)


def test_windows_count_layer_by_layer() -> None:
    windowed = DecoderShape(**(vars(SMALL) | {"windows": (None, 8, 8)}))
    saved = training_flops_per_token(SMALL, 64) - training_flops_per_token(windowed, 64)
    assert saved == pytest.approx(2 * 12 * 4 * 16 * (attended_keys(64) - attended_keys(64, 8)))
    with pytest.raises(ConfigError, match="2 attention windows for 3 layers"):
        DecoderShape(**(vars(SMALL) | {"windows": (None, 8)}))


def test_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    needed = training_flops_per_token(SMALL, 64)
    layers = forward_flops_per_token(SMALL, 64) - 2 * SMALL.head_parameters
    assert hardware_flops_per_token(SMALL, 64, "none") == needed
    assert hardware_flops_per_token(SMALL, 64, "full") == needed + layers
    assert hardware_flops_per_token(SMALL, 64, "full", every=2) == needed + layers * 2 / 3
    assert hardware_flops_per_token(SMALL, 64, "selective") == needed


def test_generating_costs_what_reading_costs() -> None:
    """Token by token, or at once: but for the logits, which reading makes for one token alone."""
    one_by_one = sum(decode_flops(SMALL, length) for length in range(1, 33))
    assert one_by_one - 31 * 2 * SMALL.head_parameters == prefill_flops(SMALL, 32)


def test_experts_and_latent_attention_equal_what_torch_counts() -> None:
    """DeepSeek's: of eight experts a token meets three, and values are narrower than keys."""
    config = parse_config(
        {
            "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32,
            "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
            "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "max_position_embeddings": 64, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(0)
    length = 16
    tokens = torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        decoder.logits(decoder(tokens, torch.arange(length).unsqueeze(0), square_attention))
    shape = decoder_shape(config)
    rest = shape.attention_operations * 3 * (length - attended_keys(length))
    experts = 2 * 2 * 3 * 3 * 32 * 16  # two layers: the counter does not know grouped products
    counted = counter.get_total_flops() / length
    assert counted == pytest.approx(forward_flops_per_token(shape, length) + rest - experts)
