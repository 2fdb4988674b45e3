"""Fixtures of the data package's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.engines.train.data import prepare as module
from fivefold.engines.train.data.build import build
from fivefold.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    texts = [Path(module.__file__).read_text("utf-8"), Path(__file__).read_text("utf-8")]
    return Tokenizer.train_bpe(iter(texts), 400)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of sources, each time one is tokenized."""
    names: list[str] = []

    def counting(source, *rest) -> None:  # type: ignore[no-untyped-def]
        names.append(source.name)
        build(source, *rest)

    monkeypatch.setattr(module, "build", counting)
    return names
