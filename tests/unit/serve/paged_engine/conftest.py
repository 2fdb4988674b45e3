"""A small model, its tokenizer, and the policy under which answers are compared to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_cases import TEXT

from fivefold.kernels import dispatch
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from tests.parity.small_models import build


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_bpe(iter(TEXT), 280)


@pytest.fixture
def decoder() -> Decoder:
    _, decoder = build("llama", vocab_size=280, eos_token_id=0)
    return decoder


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Answers are compared between batches, to the last bit of what decides them."""
    with dispatch.deterministic():
        yield
