"""The paged engine between steps: paused, asleep, with other weights."""

from __future__ import annotations

import pytest
import torch
from engine_cases import FREE, drain, engine_of, one

from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.model.decoder import Decoder
from tests.parity.small_models import build


def test_pause_and_resume(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    engine.add_request([5, 6, 7], FREE)
    engine.step()
    engine.pause()
    assert engine.step() == [] == engine.step()
    assert engine.has_work
    engine.resume()
    assert len(next(iter(drain(engine).values()))[0].token_ids) == 30


def test_new_weights_make_old_prefixes_unusable(decoder: Decoder) -> None:
    _, other = build("llama", seed=1, vocab_size=280, eos_token_id=0)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    prompt = list(range(20, 57))
    expected = one(engine_of(other), prompt, FREE)
    engine = engine_of(decoder)
    assert one(engine, prompt, FREE).token_ids != expected.token_ids
    running = engine.add_request(prompt, FREE)
    for _ in range(4):
        engine.step()
    said = list(engine._answers[running].request.token_ids)
    assert said
    engine.update_weights(state)
    assert engine.version == 1
    after = drain(engine)[running][0]
    # what was said stays; the rest is what the new weights say after it
    rest = SamplingParams(max_new_tokens=30 - len(said), ignore_eos=True)
    assert after.token_ids == [*said, *one(engine_of(other), [*prompt, *said], rest).token_ids]
    done = one(engine, prompt, FREE)
    assert done.token_ids == expected.token_ids
    engine.update_weights({"norm.weight": state["norm.weight"]}, partial=True)
    assert one(engine, prompt, FREE).cached_tokens == 0


def test_weights_that_others_changed(decoder: Decoder) -> None:
    """Training in the same process writes into them; what is packed beside follows."""
    _, other = build("llama", seed=1, vocab_size=280, eos_token_id=0)
    prompt = list(range(20, 57))
    expected = one(engine_of(other), prompt, FREE).token_ids
    engine = engine_of(decoder)
    assert one(engine, prompt, FREE).token_ids != expected
    decoder.load_state_dict(other.state_dict())
    engine.forget_cache()
    assert one(engine, prompt, FREE).token_ids == expected


def test_wrong_weights_are_refused_before_a_change(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    state = {name: torch.zeros_like(tensor) for name, tensor in decoder.state_dict().items()}
    before = decoder.norm.weight.clone()
    with pytest.raises(EngineError, match=r"no weight norm\.wait; did you mean 'norm\.weight'"):
        engine.update_weights({**state, "norm.wait": torch.zeros(1)})
    with pytest.raises(EngineError, match=r"norm\.weight is \[48\], not \[3\]"):
        engine.update_weights({**state, "norm.weight": torch.zeros(3)})
    del state["norm.weight"]
    with pytest.raises(EngineError, match=r"have no norm\.weight; .* partial=True"):
        engine.update_weights(state)
    assert torch.equal(decoder.norm.weight, before)
    assert engine.version == 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_requests_go_on(decoder: Decoder, level: int) -> None:
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    prompt = list(range(20, 57))
    expected = one(engine_of(decoder), prompt, FREE).token_ids
    engine = engine_of(decoder)
    id = engine.add_request(prompt, FREE)
    for _ in range(5):
        engine.step()
    engine.sleep(level)
    held = [*engine.runner.cache.keys, *engine.runner.cache.values]
    held += list(decoder.parameters()) if level == 2 else []
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert engine.step() == []
    with pytest.raises(EngineError, match="while sleeping"):
        engine.sleep(1)
    if level == 2:
        for wrong in (None, {"norm.weight": state["norm.weight"]}):
            with pytest.raises(EngineError, match="weights"):
                engine.wake_up(wrong)
        with pytest.raises(EngineError, match="give them to wake_up"):
            engine.update_weights(state)
        assert engine.step() == []
    engine.wake_up(state if level == 2 else None)
    assert drain(engine)[id][0].token_ids == expected
    assert one(engine, prompt, FREE).token_ids == expected
