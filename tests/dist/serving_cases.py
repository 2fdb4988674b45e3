"""Engines on several ranks against one in this process, as functions that a worker calls.

A worker has no process group of its own, as a user's process has none.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fivefold import LLM, SamplingParams
from fivefold.core.errors import FivefoldError
from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.paged.errors import EngineError, MemoryBudgetError
from fivefold.engines.serve.parallel.errors import RankError
from fivefold.engines.serve.parallel.messages import Step
from fivefold.engines.serve.parallel.rank import Rank
from fivefold.kernels.dispatch import set_deterministic
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.save import save_huggingface
from tests.dist import expert_cases
from tests.parity.small_models import build

VOCABULARY = 281  # does not divide
TEXT = ["Once upon a time there was a frog.", "def main() -> None:\n    return\n"]
# So few blocks that requests are put back, and so small a budget that prompts come in chunks.
TIGHT: dict[str, Any] = {
    "num_blocks": 40, "block_size": 4, "max_sequences": 6, "token_budget": 24
}  # fmt: skip
TOLERANCE = 1e-4

_engines: dict[tuple[Path, str], LLM] = {}


def save_models(folder: Path) -> None:
    """Dense models with tied embeddings and with a head of their own, and one of experts."""
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 280)
    for name, kind, changes in (
        ("dense", "llama", {}),
        ("one-key-head", "gemma3", {"num_key_value_heads": 1}),
        ("untied", "qwen3", {"num_hidden_layers": 5, "tie_word_embeddings": False}),
    ):
        _, decoder = build(kind, vocab_size=VOCABULARY, eos_token_id=0, **changes)
        save_huggingface(folder / name, decoder, decoder.config, tokenizer)
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "eos_token_id": 0}
    experts = Decoder(parse_config({**expert_cases.CONFIG, **shape}))
    experts.initialize(0)
    for buffer in experts.buffers():  # of routers, which decide who is chosen
        buffer.copy_(torch.linspace(-0.05, 0.05, buffer.numel()))
    save_huggingface(folder / "experts", experts, experts.config, tokenizer)


def engine_on(model: Path, layout: str = "") -> LLM:
    """Kept for the cases that follow; ranks of one layout at a time."""
    for key in [k for k in _engines if k[1] and layout and k != (model, layout)]:
        _engines.pop(key).close()
    if (model, layout) not in _engines:
        _engines[model, layout] = LLM(
            str(model), dtype="fp32", device="cpu", layout=layout, **TIGHT
        )
    return _engines[model, layout]


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 60 tokens; every third begins like the one before it."""
    draw = random.Random(0)
    found: list[list[int]] = []
    for index in range(count):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 60))]
        found.append([*found[-1][:20], *prompt[:20]] if index % 3 == 1 else prompt)
    return found


def differences(found: list[Completion], expected: list[Completion]) -> float:
    """The largest between log-probabilities; the tokens must be equal."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        pairs = zip(one.logprobs or [], other.logprobs or [], strict=True)
        asked = zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
        for here, there in (*pairs, *asked):
            if here is None or there is None:
                assert here is there
                continue
            assert here.keys() == there.keys()
            largest = max(largest, *(abs(here[t].logprob - there[t].logprob) for t in here))
    return largest


def check_same_answers(model: Path, layout: str) -> None:
    """Greedy and drawn, alone and several, in chunks, put back and from the prefix cache."""
    asked = prompts(9)
    params = [
        SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=4),
        SamplingParams(max_new_tokens=12, n=3, temperature=0.7, seed=5, logprobs=0),
        SamplingParams(max_new_tokens=9, prompt_logprobs=2, repetition_penalty=1.2),
    ] * 3
    ranks, alone = engine_on(model, layout), engine_on(model)
    before = ranks.engine.state().preemptions
    for _ in range(2):  # cold and warm
        found, expected = (e.generate(asked, params, progress=False) for e in (ranks, alone))
        assert differences(found, expected) <= TOLERANCE
        ranks.engine.check_idle()
    assert ranks.engine.state().preemptions > before
    assert ranks.engine.state().tokens_hit > 0
    states, theirs = (e.engine.served.states(asked[1]) for e in (ranks, alone))
    assert (states - theirs).abs().max() <= TOLERANCE
    assert ranks.engine.served.parameters == alone.engine.served.parameters


def check_requests_come_and_go(model: Path, layout: str) -> None:
    """An abort frees its blocks, a pause computes nothing, and others' answers stay as they were."""
    ranks, alone = engine_on(model, layout), engine_on(model)
    engine = ranks.engine
    asked, params = prompts(4), SamplingParams(max_new_tokens=20, ignore_eos=True)
    expected = [c.token_ids for c in alone.generate(asked, params, progress=False)]
    ids = [engine.add_request(prompt, params) for prompt in asked]
    found: dict[int, list[int]] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                found[output.request] = output.completion.token_ids
        steps += 1
        if steps == 3:
            engine.abort(ids[1])
            engine.pause()
            assert engine.step() == []
            engine.resume()
    assert [found[id] for id in ids if id != ids[1]] == [*expected[:1], *expected[2:]]
    engine.check_idle()


def check_new_weights(model: Path, layout: str) -> None:
    """They reach all ranks, whole or in part, awake or asleep; wrong ones change nothing."""
    ranks, alone = engine_on(model, layout), engine_on(model)
    asked, params = prompts(3), SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=0)
    old = {n: t.clone() for n, t in alone.engine.decoder.state_dict().items()}
    new = {name: tensor.flip(0) for name, tensor in old.items()}
    some = {name: new[name] for name in list(new)[:7]}

    def same() -> list[Completion]:
        found, expected = (e.generate(asked, params, progress=False) for e in (ranks, alone))
        assert differences(found, expected) <= TOLERANCE
        return found

    first = same()
    engine = ranks.engine
    with pytest.raises(EngineError, match="the model has no weight"):
        engine.update_weights({"layers.0.attention.querry.weight": old["norm.weight"]})
    with pytest.raises(EngineError, match=r"norm.weight is \[\d+\], not \[3\]"):
        engine.update_weights({"norm.weight": torch.ones(3)}, partial=True)
    with pytest.raises(EngineError, match="sleep level 3"):
        engine.sleep(3)
    same()
    for each in (ranks, alone):
        each.engine.update_weights(some, partial=True)
    assert [c.token_ids for c in same()] != [c.token_ids for c in first]
    for each in (ranks, alone):
        each.engine.update_weights(new)
    same()
    engine.sleep(1)
    engine.wake_up()
    same()
    engine.sleep(2)
    with pytest.raises(EngineError, match="sleeps without weights"):
        engine.wake_up()
    engine.wake_up(old)
    alone.engine.update_weights(old)
    assert [c.token_ids for c in same()] == [c.token_ids for c in first]


def other_ranks() -> list[psutil.Process]:
    """The processes that engines of this one have started."""
    return [p for p in psutil.Process().children() if "rank_process" in " ".join(p.cmdline())]


def check_death(model: Path, layout: str, number: int) -> None:
    """A rank that is killed while it works or waits ends the engine, in one line and at once."""
    ranks = engine_on(model, layout)
    victim = other_ranks()[-1]
    engine = ranks.engine
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert engine.step()
    os.kill(victim.pid, number)
    started = time.monotonic()
    with pytest.raises(EngineError, match=f"pid {victim.pid}\\) was killed by SIG") as told:
        ranks.generate([[5]], SamplingParams(max_new_tokens=60, ignore_eos=True), progress=False)
    assert time.monotonic() - started < 20
    assert "\n" not in str(told.value)
    assert isinstance(engine.served.ended, RankError)
    with pytest.raises(EngineError, match="was killed"):
        ranks.generate([[5]], progress=False)
    assert not other_ranks()
    engine.check_idle()
    _engines.pop((model, layout))


def check_interrupt(model: Path, layout: str) -> None:
    """Ctrl-C in the middle of a step leaves ranks at different places: nothing goes on from there."""
    ranks = engine_on(model, layout)

    def interrupted(rank: Rank, step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.generate([[5]], progress=False)
    assert not other_ranks()
    ranks.engine.check_idle()
    with pytest.raises(EngineError, match="interrupted in the middle of a step; start the engine"):
        ranks.generate([[5]], progress=False)
    _engines.pop((model, layout))


def check_close(model: Path, layout: str) -> None:
    """Nothing is left but the word that it is closed; another may be made."""
    ranks = engine_on(model, layout)
    with pytest.raises(EngineError, match="one of a group of ranks already; close the other"):
        LLM(str(model), dtype="fp32", device="cpu", layout=layout, **TIGHT)
    ranks.close()
    ranks.close()
    assert not other_ranks()
    with pytest.raises(EngineError, match="the engine is closed"):
        ranks.generate([[5]], progress=False)
    _engines.pop((model, layout))


def check_same_bits(model: Path, layout: str) -> None:
    """Under the deterministic policy log-probabilities are one process's, with new weights too."""
    given: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "deterministic": True, **TIGHT}
    ranks, alone = LLM(str(model), layout=layout, **given), LLM(str(model), **given)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=4)
    new = {n: t.flip(0) for n, t in alone.engine.decoder.state_dict().items()}
    for _ in range(2):
        found, expected = (e.generate(prompts(5), params, progress=False) for e in (ranks, alone))
        assert differences(found, expected) == 0
        for each in (ranks, alone):
            each.engine.update_weights(new)
    ranks.close()
    set_deterministic(False)


def check_no_room(model: Path, layout: str) -> None:
    """Memory is measured on all ranks, and asked for before weights are read."""
    for key in [k for k in _engines if k[1]]:
        _engines.pop(key).close()
    given: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "layout": layout}
    with pytest.raises(MemoryBudgetError, match="its weights take"):
        LLM(str(model), memory_share=1e-6, **given)
    assert not other_ranks()
    measured = LLM(str(model), max_sequences=2, max_context=64, block_size=4, **given)
    assert measured.engine.state().blocks == 2 * 16
    measured.close()


def refusals(model: Path, experts: Path) -> list[str]:
    """What each impossible layout is told; no process is started for it."""
    asked: list[tuple[Path, str, dict[str, Any]]] = [
        (model, "tp=4", {}),
        (model, "pp=4", {}),
        (model, "ep=2", {}),
        (experts, "ep=3", {}),
        (model, "cp=2", {}),
        (model, "dp_shard=2", {}),
        (model, "dp_replicate=2", {}),
        (model, "tp=2,schedule=zbv", {}),
        (model, "tp=2", {"deterministic": True}),
        (model, "tp=2", {"weights": "int8"}),
        (model, "tp=2", {"max_context": 4096}),
        (model, "tp=two", {}),
    ]
    found = []
    for path, layout, settings in asked:
        with pytest.raises(FivefoldError) as told:
            LLM(str(path), dtype="fp32", device="cpu", layout=layout, **settings)
        nothing_was_started()
        found.append(str(told.value))
    _, decoder = build("llama")
    with pytest.raises(FivefoldError) as told:
        LLM(decoder, layout="tp=2")
    return [*found, str(told.value)]


def nothing_was_started() -> None:
    """A refusal has started nothing; the policy may have been switched before it."""
    assert not other_ranks()
    set_deterministic(False)


def orphans(model: Path, layout: str) -> list[int]:
    """The ids of the processes of an engine that is left as it is."""
    engine_on(model, layout)
    return [process.pid for process in other_ranks()]


KILL = int(signal.SIGKILL)
