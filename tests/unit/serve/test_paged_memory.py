"""Memory for the cache is measured, bounded, and refused in one line with numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fivefold.engines.serve.paged import memory, settings
from fivefold.engines.serve.paged.cache import bytes_per_block
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.errors import EngineError, MemoryBudgetError
from fivefold.engines.serve.paged.memory import (
    Footprint,
    blocks_that_fit,
    check_weights_fit,
    memory_left,
    weight_bytes,
)
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.model.decoder import Decoder
from tests.parity.small_models import build

CPU = torch.device("cpu")
VOCABULARY = 400_000
WORST_STEP = f"""
from fivefold.engines.serve.paged.memory import profile_peak, weight_bytes
from tests.parity.small_models import build
_, decoder = build("llama", vocab_size={VOCABULARY})
found = profile_peak(decoder, 64, 8, 16)
print(weight_bytes(decoder), found.weights, found.step)
"""


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build("llama")[1]


def left(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    for module in (memory, settings):
        monkeypatch.setattr(module, "memory_left", lambda device: (total, free))


def test_weights_count_each_piece_of_memory_once(decoder: Decoder) -> None:
    assert weight_bytes(decoder) == sum(p.numel() * 4 for p in decoder.parameters())
    view = Decoder(decoder.config)
    view.layers[0].attention.key.weight = torch.nn.Parameter(
        view.layers[0].attention.query.weight.data[:24]
    )
    assert weight_bytes(view) == weight_bytes(decoder) - 24 * 48 * 4


def test_a_worst_step_is_measured() -> None:
    """Logits of 8 sequences over a large vocabulary are the most of it: they must be seen."""
    # In a process of its own: in this one a step may take memory that earlier tests gave back to
    # the allocator, which is resident already and rightly not counted again.
    done = subprocess.run([sys.executable, "-c", WORST_STEP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted, weights, step = map(int, done.stdout.split())
    logits = 8 * VOCABULARY * 4
    assert weights == counted
    assert logits <= step <= 12 * logits


def test_blocks_that_fit(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    each = bytes_per_block(decoder.config, 16, torch.float32)
    left(monkeypatch, 1000 * each, 500 * each)
    step = Footprint(weights=10, step=30 * each)
    assert blocks_that_fit(decoder, step, 16, torch.float32, 0.9) == 500 - 100 - 30
    assert blocks_that_fit(decoder, step, 16, torch.bfloat16, 0.9) == 2 * (500 - 100 - 30)
    with pytest.raises(MemoryBudgetError) as caught:
        blocks_that_fit(decoder, Footprint(2**30, 400 * each), 16, torch.float32, 0.9)
    assert "1 GiB of weights are loaded, a step takes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left(monkeypatch, 10 * 2**30, 4 * 2**30)
    check_weights_fit(2 * 2**30, CPU, 0.9)
    with pytest.raises(
        MemoryBudgetError, match=r"weights take 5 GiB, but 3 GiB of 10 GiB are left"
    ):
        check_weights_fit(5 * 2**30, CPU, 0.9)


def test_an_engine_takes_what_it_can_use(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    each = bytes_per_block(decoder.config, 32, torch.float32)
    tight = EngineSettings(max_sequences=3, token_budget=16)
    assert Engine(decoder, None, tight).blocks.num_blocks == 3 * 128 // 32
    monkeypatch.setattr(settings, "HOST_KV_BYTES", 5 * each + 1)
    assert Engine(decoder, None, tight).blocks.num_blocks == 5
    given = EngineSettings(kv_bytes=7 * each + 9)
    assert Engine(decoder, None, given).blocks.num_blocks == 7
    assert Engine(decoder, None, EngineSettings(num_blocks=9)).blocks.num_blocks == 9
    half = EngineSettings(kv_bytes=7 * each, kv_dtype=torch.bfloat16)
    assert Engine(decoder, None, half).blocks.num_blocks == 14


def test_a_budget_that_cannot_be_had(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryBudgetError, match="kv_bytes is 10 B, but one block of cache takes"):
        Engine(decoder, None, EngineSettings(kv_bytes=10))
    left(monkeypatch, 2**31, 2**30)
    with pytest.raises(MemoryBudgetError, match=r"asks for 3 GiB, but 1 GiB of 2 GiB are free"):
        Engine(decoder, None, EngineSettings(kv_bytes=3 * 2**30))
    left(monkeypatch, 2**31, 2**27)
    with pytest.raises(MemoryBudgetError, match="the model does not fit"):
        Engine(decoder, None, EngineSettings())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_sequences": 0}, "max_sequences=0"),
        ({"token_budget": True}, "token_budget=True"),
        ({"block_size": 1.5}, "block_size=1.5"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"memory_share": 1.1}, "memory_share=1.1"),
        ({"kv_dtype": torch.int8}, "kv_dtype=torch.int8"),
    ],
)
def test_wrong_settings(given: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError) as caught:
        EngineSettings(**given)
    assert words in str(caught.value)


def test_a_context_beyond_the_models(decoder: Decoder) -> None:
    with pytest.raises(EngineError, match="max_context=129 is more than the model's 128"):
        Engine(decoder, None, EngineSettings(max_context=129, num_blocks=4))


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_bounds_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory_left(CPU)[0] == total
    limit, usage, statistics, key = memory.GROUPS[2 - version]
    for name, text in ((limit, "1000000"), (usage, "700000"), (statistics, f"a 1\n{key} 50000\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(CPU) == (1_000_000, 350_000)
    (tmp_path / statistics).unlink()
    assert memory_left(CPU) == (1_000_000, 300_000)
    (tmp_path / limit).write_text("max")
    assert memory_left(CPU)[0] == total
