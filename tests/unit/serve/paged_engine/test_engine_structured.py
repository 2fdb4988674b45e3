"""Answers of a given form beside free ones, whatever the scheduler does with them."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import jsonschema
import pytest
from engine_cases import drain, engine_of, essence, one, prompts

from fivefold import LLM
from fivefold.core.errors import PromptError
from fivefold.engines.serve.generate import Generator
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.structured.form import StructuredOutputs
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["ok", "n"], "additionalProperties": False,
}  # fmt: skip
FORMS = [
    StructuredOutputs(regex="[a-f]{5,9}"),
    StructuredOutputs(choice=["red", "green", "blue"]),
    StructuredOutputs(grammar='root ::= "(" [0-9]{1,4} ")"'),
    StructuredOutputs(regex="(ab|cd){3}"),
]
SETTINGS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0, "top_k": 3, "seed": 2},
    {"repetition_penalty": 1.5, "logprobs": 2}, {"frequency_penalty": 2.0}, {"n": 3, "temperature": 1.5, "seed": 3},
]  # fmt: skip


def bound() -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=40, structured_outputs=form, **more)
        for form in FORMS
        for more in SETTINGS
    ]


def has_form(text: str, form: StructuredOutputs) -> bool:
    if form.choice is not None:
        return text in form.choice
    return re.fullmatch(form.regex or r"\([0-9]{1,4}\)", text) is not None


@pytest.mark.parametrize("blocks", [300, 26])
def test_bound_and_free_answers_do_not_know_of_each_other(
    decoder: Decoder, tokenizer: Tokenizer, blocks: int
) -> None:
    """With 26 blocks sequences are put back all the time."""
    free = [SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=n) for n in range(6)]  # fmt: skip
    params = [p for pair in zip(bound(), free * 4, strict=True) for p in pair]
    asked = prompts(len(params), seed=5)
    alone, engine = [], engine_of(decoder, tokenizer)
    for prompt, each in zip(asked, params, strict=True):
        id = engine.add_request(prompt, each)
        alone.append(essence(drain(engine)[id]))
    engine = engine_of(decoder, tokenizer, num_blocks=blocks, token_budget=11, queue_limit=99)
    ids = [engine.add_request(p, q) for p, q in zip(asked, params, strict=True)]
    together = drain(engine)
    assert [essence(together[id]) for id in ids] == alone
    assert (engine.state().preemptions > 0) == (blocks == 26)
    for id, each in zip(ids, params, strict=True):
        if each.structured_outputs is None:
            continue
        assert len(together[id]) == each.n
        for completion in together[id]:
            assert completion.finish_reason == "stop"
            # Not `text`: prompts drawn by token may end within a character.
            assert has_form(tokenizer.decode(completion.token_ids), each.structured_outputs)


def test_json_of_a_schema_ends_by_itself(decoder: Decoder, tokenizer: Tokenizer) -> None:
    form = StructuredOutputs(json=SCHEMA)
    for seed in range(8):
        params = SamplingParams(
            max_new_tokens=400, temperature=1.0, seed=seed, structured_outputs=form
        )
        found = one(engine_of(decoder, tokenizer, num_blocks=300), [9, 8, 7], params)
        if found.finish_reason == "stop":
            jsonschema.validate(json.loads(found.text), SCHEMA)
        else:  # blanks for ever, which may be: the random model never tires
            assert found.finish_reason == "length"


def test_the_reported_distribution_is_the_models_own(
    decoder: Decoder, tokenizer: Tokenizer
) -> None:
    plain = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=3)
    form = StructuredOutputs(choice=["red"])
    bound = SamplingParams(max_new_tokens=9, logprobs=3, structured_outputs=form)
    free, held = (one(engine_of(decoder, tokenizer), [5, 6], p) for p in (plain, bound))
    assert free.logprobs is not None and held.logprobs is not None
    likeliest = set(free.token_ids)
    assert likeliest <= held.logprobs[0].keys()  # though it was ruled out
    assert held.logprobs[0][held.token_ids[0]].logprob < free.logprobs[0][free.token_ids[0]].logprob


def test_a_bias_against_the_form_does_not_break_it(decoder: Decoder, tokenizer: Tokenizer) -> None:
    engine = engine_of(decoder, tokenizer)
    (token,) = tokenizer.encode("z")
    against = SamplingParams(
        max_new_tokens=5, structured_outputs=StructuredOutputs(regex="z"),
        logit_bias={token: -100.0},
    )  # fmt: skip
    beside = SamplingParams(max_new_tokens=5, ignore_eos=True)
    first, second = (engine.add_request([4, 5], p) for p in (against, beside))
    found = drain(engine)
    assert found[first][0].text == "z"  # a bias is finite: nothing else was allowed
    assert len(found[second][0].token_ids) == 5


def test_models_that_lack_the_letter_end_with_an_error(decoder: Decoder) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    words = {"<end>": 0, **{chr(97 + i): 1 + i for i in range(20)}}  # a to t
    backend = Backend(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<end>"})
    engine = engine_of(decoder, tokenizer)
    params = SamplingParams(max_new_tokens=5, structured_outputs=StructuredOutputs(regex="az"))
    beside = SamplingParams(max_new_tokens=5, ignore_eos=True)
    first, second = (engine.add_request([4, 5], p) for p in (params, beside))
    found = drain(engine)
    assert found[first][0].finish_reason == "error"
    assert "no token of the vocabulary goes on" in str(found[first][0].stop_reason)
    assert len(found[second][0].token_ids) == 5


def test_a_form_that_cannot_be_read_leaves_the_engine_as_it_was(
    decoder: Decoder, tokenizer: Tokenizer
) -> None:
    engine = engine_of(decoder, tokenizer)
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    for refuse in (engine.add_request, engine.check_request):
        with pytest.raises(PromptError, match="parenthesis is not closed"):
            refuse([4, 5], params)
    engine.check_idle()
    assert not engine.has_work


@pytest.mark.parametrize("more", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_goes_past_the_end_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=next(iter(more))):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **more)


def test_a_dictionary_is_no_form() -> None:
    with pytest.raises(PromptError, match=r"write StructuredOutputs\(json=...\)"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_the_simple_generator_names_the_engine(decoder: Decoder, tokenizer: Tokenizer) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(PromptError, match=r"use fivefold\.LLM"):
        Generator(decoder, tokenizer).generate(["a"], params)


def test_forms_travel_to_the_engines_process() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA))
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_library_offers_it(tokenizer: Tokenizer) -> None:
    llm = LLM(build("llama", vocab_size=280, eos_token_id=0)[1], tokenizer, num_blocks=200)
    form = StructuredOutputs(choice=["left", "right"])
    params = SamplingParams(structured_outputs=form, temperature=1.0)
    found = llm.generate(["go"] * 8, params, progress=False)
    assert {c.text for c in found} <= {"left", "right"}
