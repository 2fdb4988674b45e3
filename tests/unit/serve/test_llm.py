"""The offline interface: answers in order, chats, progress, errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import fivefold
from fivefold import LLM, SamplingParams
from fivefold.core.errors import ConfigError, LayoutError, PromptError, TokenizerError, WeightsError
from fivefold.engines.serve.completion import Completion
from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.kernels import dispatch
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build

TEXT = ["Once upon a time there was a frog.", "def main() -> None:\n    return\n"]
SETTINGS: dict[str, Any] = {"num_blocks": 100, "max_sequences": 4, "token_budget": 20}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_bpe(iter(TEXT), 280)


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> LLM:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    return LLM(decoder, tokenizer, **SETTINGS)


def test_what_is_refused_leaves_the_policy_as_it_was() -> None:
    with pytest.raises(LayoutError, match="a decoder in memory has no file for"):
        LLM(build("llama")[1], deterministic=True, layout="tp=2")
    assert not dispatch.is_deterministic()
    try:
        LLM(build("llama")[1], deterministic=True, **SETTINGS)
        assert dispatch.is_deterministic()
    finally:
        dispatch.set_deterministic(False)


def test_answers_are_in_order_and_the_generators(llm: LLM) -> None:
    prompts: list[Any] = ["Once upon", [9, 8, 7], "a frog.", [5] * 30, "def", "main", "time"]
    params = [SamplingParams(max_new_tokens=4 + 3 * (n % 3)) for n in range(7)]
    expected = Generator(llm.engine.decoder, llm.engine.tokenizer).generate(prompts, params)
    found = llm.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.text for c in found] == [c.text for c in expected]
    llm.engine.check_idle()
    assert llm.generate("Once upon", params[0])[0].text == expected[0].text
    assert llm.generate([]) == []
    assert len(llm.generate([[5]])[0].token_ids) <= 128


def test_more_prompts_than_may_wait(tokenizer: Tokenizer) -> None:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    small = LLM(decoder, tokenizer, **SETTINGS, queue_limit=2)
    prompts = [[n + 3, 7] for n in range(15)]
    found = small.generate(prompts, SamplingParams(max_new_tokens=3))
    assert len(found) == 15
    small.engine.check_idle()


def test_several_answers_and_the_best_of_them(llm: LLM) -> None:
    several = SamplingParams(max_new_tokens=6, temperature=1.5, seed=1, n=5)
    found = llm.generate([[5, 6], [7]], several)
    assert [c.index for c in found] == [0, 1, 2, 3, 4] * 2
    best = SamplingParams(max_new_tokens=6, temperature=1.5, seed=1, n=2, best_of=5, logprobs=0)
    ranked = llm.generate([[5, 6], [7]], best)
    assert [c.index for c in ranked] == [0, 1] * 2

    def mean(completion: Completion) -> float:
        assert completion.logprobs is not None
        own = [
            step[t].logprob
            for t, step in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(own))
        return sum(own) / len(own)

    for place in (0, 2):
        first, second = ranked[place], ranked[place + 1]
        assert mean(first) >= mean(second)
        produced = [c.token_ids for c in found[(place // 2) * 5 : (place // 2) * 5 + 5]]
        assert first.token_ids in produced and second.token_ids in produced


def test_a_chat_is_what_the_template_makes_of_it(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None and tokenizer.chat is not None
    conversation = [{"role": "user", "content": "a frog"}]
    ids = tokenizer.encode(tokenizer.chat.render(conversation), add_special=False)
    params = SamplingParams(max_new_tokens=5)
    (alone,) = llm.chat(conversation, params)
    assert alone.token_ids == llm.generate([ids], params)[0].token_ids
    two = llm.chat([conversation, [{"role": "user", "content": "time"}]], params)
    assert len(two) == 2 and two[0].token_ids == alone.token_ids
    assert llm.chat([], params) == []


def test_a_wrong_prompt_stops_all_before_any_work(llm: LLM) -> None:
    steps = llm.engine.state().steps
    for prompts, words in [
        ([[5], [7] * 128], "128 tokens, but the model's context is 128"),
        ([5, 6], "write generate([[1, 2, ...]])"),
        ([[5], [280]], "token 280"),
    ]:
        with pytest.raises(PromptError) as caught:
            llm.generate(prompts)  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(PromptError, match="2 prompts, but 1 sampling"):
        llm.generate([[5], [6]], [SamplingParams()])
    assert llm.engine.state().steps == steps
    llm.engine.check_idle()


def test_an_interrupt_leaves_the_engine_idle(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = llm.engine.runner.hidden
    calls = []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return hidden(*given)

    monkeypatch.setattr(llm.engine.runner, "hidden", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6], [7]] * 5, SamplingParams(max_new_tokens=9, ignore_eos=True))
    llm.engine.check_idle()
    assert len(llm.generate([[5, 6]], SamplingParams(max_new_tokens=3, ignore_eos=True))) == 1


def test_an_engine_that_fails_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "hidden", fail)
        with pytest.raises(EngineError, match="RuntimeError: no memory") as caught:
            llm.generate([[5, 6], [7]])
    assert isinstance(caught.value.__cause__, RuntimeError)
    llm.engine.check_idle()


def test_wrong_settings() -> None:
    _, decoder = build("llama")
    with pytest.raises(EngineError, match="no setting max_sequence; did you mean 'max_sequences'"):
        LLM(decoder, max_sequence=3)
    with pytest.raises(ConfigError, match="no number format 'bf61'"):
        LLM("smollm2", dtype="bf61")
    with pytest.raises(ConfigError, match="no device 'gpu'"):
        LLM("smollm2", device="gpu")
    with pytest.raises(WeightsError, match="no model smolm2; did you mean 'smollm2'"):
        LLM("smolm2")
    with pytest.raises(TokenizerError, match="no chat template"):
        LLM(decoder, num_blocks=4).chat([{"role": "user", "content": "x"}])


def test_the_generator_refuses_what_it_does_not_do() -> None:
    _, decoder = build("llama")
    for params in (
        SamplingParams(n=2),
        SamplingParams(best_of=2),
        SamplingParams(prompt_logprobs=1),
    ):
        with pytest.raises(PromptError, match=r"use fivefold\.LLM"):
            Generator(decoder, None).generate([[5]], params)


def test_a_bar_is_drawn_on_a_terminal_alone(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate([[5]] * 3, SamplingParams(max_new_tokens=2))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal then
    llm.generate([[5]] * 3, SamplingParams(max_new_tokens=2))
    shown = capsys.readouterr()
    assert shown.out == "" and "3/3" in shown.err and "tokens/s" in shown.err
    llm.generate([[5]] * 3, SamplingParams(max_new_tokens=2), progress=False)
    assert capsys.readouterr() == ("", "")


def test_importing_fivefold_is_light() -> None:
    code = "import sys, fivefold; print('torch' in sys.modules); fivefold.LLM; print('torch' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        fivefold.LML  # noqa: B018
