"""Every family held to transformers: logits, greedy answers, configs, and rounding in bf16."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from family_cases import (
    FAMILIES,
    configs,
    distance,
    greedy,
    ids,
    logits,
    ours_of,
    pair,
    theirs_of,
    transformers_config,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fivefold.kernels import dispatch
from fivefold.model.families import export_config, parse_config

# fp32 against fp32: the same sums in another order.
TOLERANCE = 1e-5
STEPS = 8

held = settings(
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
@held
@given(st.data())
def test_logits_equal_transformers(family: str, data: st.DataObject) -> None:
    theirs, ours = pair(data.draw(configs(family)))
    # Windows of 1 to 9 are exceeded; so is the context of 32, now and then.
    tokens = ids(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 48)), seed=1)
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert distance(logits(ours, tokens), expected) <= TOLERANCE


@each_family
@held
@given(st.data())
def test_greedy_answers_through_the_cache_equal_transformers(
    family: str, data: st.DataObject
) -> None:
    # transformers' cache does not forget where the window is 1 (it keeps the last -1 + 1 = all).
    theirs, ours = pair(data.draw(configs(family, narrowest=2)))
    prompt = ids(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 36)), seed=2)
    out = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=STEPS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    scores = torch.stack(out.logits)
    best = scores.topk(2).values
    # A tie within rounding may fall either way: no statement about such a draw.
    assume((best[..., 0] - best[..., 1]).min() > 10 * TOLERANCE * scores.abs().max())
    assert greedy(ours, prompt, STEPS).tolist() == out.sequences[:, prompt.shape[1] :].tolist()


@each_family
@held
@given(st.data())
def test_exported_configs_open_in_transformers_as_the_same_model(
    family: str, data: st.DataObject
) -> None:
    hf = data.draw(configs(family))
    theirs = theirs_of(hf, seed=3)
    parsed = parse_config(json.loads(theirs.config.to_json_string()))
    exported = export_config(parsed)
    again = theirs_of(exported, seed=4)
    again.load_state_dict(theirs.state_dict())
    tokens = ids(2, 40, seed=5)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    # And what transformers then saves is still that model to us.
    assert parse_config(json.loads(again.config.to_json_string())) == parsed


@each_family
@held
@given(st.data())
def test_the_config_before_and_after_transformers_is_the_same_model(
    family: str, data: st.DataObject
) -> None:
    hf = data.draw(configs(family))
    saved = json.loads(transformers_config(hf).to_json_string())
    assert parse_config(saved).ropes == parse_config(hf).ropes
    assert parse_config(saved).windows == parse_config(hf).windows


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "sliding_window": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("native", [True, False], ids=["native", "through-fp32"])
@each_family
def test_bf16_is_no_further_from_fp32_than_transformers(
    family: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root mean square over 8 models of 2 x 48 tokens; weights rounded to bf16 beforehand.

    Measured 0.84 to 0.90 of transformers' distance where its norms round twice and ours once,
    0.995 to 1.003 for Gemma, which rounds in the same places: hence the 2% of slack.
    """
    monkeypatch.setattr(dispatch, "NATIVE_ON_CPU", frozenset({torch.bfloat16} if native else ()))
    ours_off = theirs_off = 0.0
    for seed in range(8):
        wide = theirs_of({"model_type": family, **SIZES}, seed).bfloat16().float()
        config = parse_config(json.loads(wide.config.to_json_string()))
        ours = ours_of(wide, config).bfloat16()
        tokens = ids(2, 48, seed)
        with torch.no_grad():
            exact = wide(tokens).logits
            theirs = wide.bfloat16()(tokens).logits.float()
        ours_off += (logits(ours, tokens) - exact).square().mean().item()
        theirs_off += (theirs - exact).square().mean().item()
    assert 0 < ours_off**0.5 <= 1.02 * theirs_off**0.5
