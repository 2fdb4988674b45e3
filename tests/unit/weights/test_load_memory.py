"""Loading takes little more memory than the loaded model: each measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_cases import write_gguf

from fivefold.model.decoder import Decoder
from fivefold.model.families import export_config, parse_config, weight_names
from fivefold.weights.save import save_huggingface

SHAPE = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# The peak, and what is held, over what there was with everything imported and warmed up. A fork
# begins without the libraries' pages, so that each warms up by loading a small model stored alike.
PROGRAM = """
import json, os, sys, torch
from fivefold.weights.open import load_decoder, open_source

def kilobytes(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])

def load(path, dtype):
    decoder = load_decoder(path, dtype)
    total = sum(p.double().sum().item() for p in decoder.parameters() if p.ndim < 2)
    for p in decoder.parameters():
        p.view(-1)[:: 512].abs().max()  # touches every page
    return decoder

def measure(path, dtype):
    load(path.replace("/large/", "/small/"), dtype)
    open_source(path)
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = kilobytes("VmRSS")
    decoder = load(path, dtype)
    held = kilobytes("VmRSS")  # before the peak: reading takes a page itself
    return {
        "peak": (kilobytes("VmHWM") - before) / 1024,
        "held": (held - before) / 1024,
        "size": sum(p.nbytes for p in decoder.parameters()) / 2**20,
        "largest": max(p.nbytes for p in decoder.parameters()) / 2**20,
        "meta": any(p.is_meta for p in decoder.parameters()),
    }

folder = sys.argv[1]
torch.set_num_threads(1)  # forks need a parent without a pool of threads
for stored, dtype in json.loads(sys.argv[2]):
    load(f"{folder}/small/{stored}", getattr(torch, dtype))
for stored, dtype in json.loads(sys.argv[2]):
    if os.fork() == 0:
        print(json.dumps([stored, dtype, measure(f"{folder}/large/{stored}", getattr(torch, dtype))]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
CASES = [
    ("fp32", "float32"),
    ("fp32", "bfloat16"),
    ("bf16", "bfloat16"),
    ("bf16", "float32"),
    ("f16.gguf", "float32"),
    ("q8.gguf", "float32"),
    ("q8.gguf", "bfloat16"),
]
# Pages of shared libraries and allocator slack that a first use of an operator brings along.
SLACK = 16.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_all_forms(folder / "large", SHAPE)
    write_all_forms(
        folder / "small", SHAPE | {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 8}
    )
    return folder


def write_all_forms(folder: Path, shape: dict[str, Any]) -> None:
    config = parse_config(shape)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.uniform_(-1, 1)
    save_huggingface(folder / "fp32", decoder, config)
    save_huggingface(folder / "bf16", decoder, config, dtype=torch.bfloat16)
    state = {name: decoder.get_parameter(ours) for ours, name in weight_names(config).items()}
    write_gguf(folder / "f16.gguf", export_config(config), state, type=Type.F16)
    write_gguf(folder / "q8.gguf", export_config(config), state, type=Type.Q8_0)


@pytest.fixture(scope="module")
def all_measured(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What each case took, in a fork of one process that has imported everything."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(CASES)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {(stored, dtype): measured for stored, dtype, measured in lines}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("stored", "dtype"), CASES)
def test_the_peak_is_the_model_and_one_tensor(
    all_measured: dict[tuple[str, str], dict[str, Any]], stored: str, dtype: str
) -> None:
    measured = all_measured[stored, dtype]
    size = measured["size"]
    assert not measured["meta"]
    assert size > 200 if dtype == "float32" else size > 100  # else the slack would hide a copy
    # A tensor on its way, and holes that small temporaries leave in the allocator's heap.
    allowed = 1.15 * size + 2 * measured["largest"] + SLACK
    assert measured["peak"] < allowed
    assert measured["held"] <= measured["peak"]
