"""Loading takes little more memory than the loaded model: measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
# The peak, and what is held, over what there was with everything imported and warmed up.
PROGRAM = """
import json, sys, torch
from fivefold.weights.open import load_decoder, open_source

def kilobytes(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])

path, dtype, small = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3]
load_decoder(small, dtype)
open_source(path)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kilobytes("VmRSS")
decoder = load_decoder(path, dtype)
total = sum(p.double().sum().item() for p in decoder.parameters() if p.ndim < 2)
for p in decoder.parameters():
    p.view(-1)[:: 512].abs().max()  # touches every page
held = kilobytes("VmRSS")  # before the peak: reading takes a page itself
print(json.dumps({
    "peak": (kilobytes("VmHWM") - before) / 1024,
    "held": (held - before) / 1024,
    "size": sum(p.nbytes for p in decoder.parameters()) / 2**20,
    "largest": max(p.nbytes for p in decoder.parameters()) / 2**20,
    "meta": any(p.is_meta for p in decoder.parameters()),
}))
"""
# Pages of shared libraries and allocator slack that a first use of an operator brings along.
SLACK = 16.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    config = parse_config(SHAPE)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.uniform_(-1, 1)
    save_huggingface(folder / "fp32", decoder, config)
    save_huggingface(folder / "bf16", decoder, config, dtype=torch.bfloat16)
    state = {name: decoder.get_parameter(ours) for ours, name in weight_names(config).items()}
    write_gguf(folder / "f16.gguf", export_config(config), state, type=Type.F16)
    write_gguf(folder / "q8.gguf", export_config(config), state, type=Type.Q8_0)
    small = parse_config(SHAPE | {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 8})
    save_huggingface(folder / "small", Decoder(small), small, dtype=torch.bfloat16)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("fp32", "float32"),
        ("fp32", "bfloat16"),
        ("bf16", "bfloat16"),
        ("bf16", "float32"),
        ("f16.gguf", "float32"),
        ("q8.gguf", "float32"),
        ("q8.gguf", "bfloat16"),
    ],
)
def test_the_peak_is_the_model_and_one_tensor(folder: Path, stored: str, dtype: str) -> None:
    arguments = [str(folder / stored), dtype, str(folder / "small")]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    measured = json.loads(run.stdout)
    size = measured["size"]
    assert not measured["meta"]
    assert size > 200 if dtype == "float32" else size > 100  # else the slack would hide a copy
    # A tensor on its way, and holes that small temporaries leave in the allocator's heap.
    allowed = 1.15 * size + 2 * measured["largest"] + SLACK
    assert measured["peak"] < allowed
    assert measured["held"] <= measured["peak"]
