"""Numbers that no traffic has are refused in one line, before anything is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core.errors import PlanError
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models import shape
from fivefold.plan.serving.question import ANYWAY, MOST_USERS, TOKENS, Question
from fivefold.plan.serving.report import answer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": float("nan")}, "--rate is nan"),
        ({"rate": float("inf")}, "--rate is inf"),
        ({"rate": -1.0}, "--rate is -1"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"concurrency": MOST_USERS + 1}, "more than a simulation takes"),
        ({"shared_prefix": -1}, "--shared-prefix is -1; give 0 or more"),
        ({"requests": 0}, "--requests is 0"),
        ({"input_tokens": -5}, "--input-tokens is -5"),
        ({"speed": float("nan")}, "--speed is nan"),
    ],
)
def test_numbers_that_no_traffic_has(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Question(**given)


def test_long_prompts_are_fewer() -> None:
    traffic = Question(rate=5.0, input_tokens=100_000, output_tokens=3000).traffic
    assert traffic is not None
    assert len(traffic.demands) == max(ANYWAY, TOKENS // 103_000)


def test_rates_beyond_the_roofline_are_not_simulated() -> None:
    with pytest.raises(PlanError, match=r"1e\+06 requests/s are impossible on 8xH100: .* at most"):
        answer(shape("llama-3.1-8b"), cluster("8xH100"), Question(rate=1e6))


def test_requests_longer_than_the_model_reads() -> None:
    question = Question(layout="tp=1", rate=1.0, input_tokens=200_000)
    with pytest.raises(PlanError, match=r"200,300 tokens .* is made for 131,072"):
        answer(shape("llama-3.1-8b"), cluster("8xH100"), question)
