from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fivefold.core.errors import PromptError
from fivefold.engines.serve.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot' is no number"),
        ({"temperature": True}, "temperature=True is no number"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5 is no whole number"),
        ({"top_p": 0}, "top_p=0 leaves no token"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": -1e-9}, "min_p=-1e-09"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens=9 is more than max_new_tokens=8"),
        ({"logprobs": 65}, "logprobs=65"),
        ({"logprobs": True}, "logprobs=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 64}, f"seed={1 << 64}"),
        ({"stop": [""]}, "empty stop string"),
        ({"stop": [3]}, "stop string 3 is no text"),
        ({"stop": 3}, "stop=3 is no list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry=-1"),
        ({"stop_token_ids": ["</s>"]}, "is no whole number"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]=101"),
        ({"logit_bias": {"a": 1}}, "logit_bias token id='a'"),
        ({"logit_bias": [1]}, "is no mapping"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_mend(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PromptError) as caught:
        SamplingParams(**given)
    assert words in str(caught.value)
    assert caught.value.mend
    assert "\n" not in str(caught.value)


def test_defaults_are_greedy_and_leave_the_logits_alone() -> None:
    params = SamplingParams()
    assert params.greedy
    assert not params.uses_history
    assert params.stops == ()


def test_a_single_stop_string_is_not_taken_letter_by_letter() -> None:
    assert SamplingParams(stop="END").stops == ("END",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
