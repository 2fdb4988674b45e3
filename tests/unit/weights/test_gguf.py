"""GGUF files of every family hold the model that transformers has, and say what they lack."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_cases import finish, write_gguf
from weights_families import CLASSES, logits_of_ours, logits_of_theirs, make_theirs, relative_error

from fivefold.core.errors import FivefoldError, TokenizerError, WeightsError
from fivefold.model.families import export_config, parse_config
from fivefold.weights.gguf_config import llama3_factors
from fivefold.weights.open import load_decoder, open_source

TOLERANCE = 1e-5  # fp32 in another order
ENDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.padding_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
METADATA: dict[str, dict[str, Any]] = {
    "llama": {"ARCH.rope.dimension_count": 16, "tokenizer.ggml.eot_token_id": 5},
    "mistral": {"ARCH.attention.sliding_window": 6},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"ARCH.attention.sliding_window": 5},
}


def their_config(theirs: Any) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4, as our families export it."""
    return export_config(parse_config(theirs.config.to_dict()))


def write(path: Path, family: str, theirs: Any | None = None, **options: Any) -> Path:
    theirs = make_theirs(family) if theirs is None else theirs
    state = dict(theirs.named_parameters())
    metadata = METADATA[family] | ENDS | {"tokenizer.ggml.eos_token_id": 2}
    metadata |= options.pop("metadata", {})
    return write_gguf(path, their_config(theirs), state, metadata=metadata, **options)


@pytest.mark.parametrize("family", CLASSES)
def test_every_family(family: str, tmp_path: Path) -> None:
    changes = {"layer_types": ["sliding_attention"] * 3} if family == "gemma3_text" else {}
    theirs = make_theirs(family, **changes)
    path = write(tmp_path / "model.gguf", family, theirs)
    source = open_source(path)
    assert source.kind == "gguf" and source.config == parse_config(theirs.config.to_dict())
    ours = load_decoder(path)
    for name, value in theirs.named_parameters():
        # Gemma's norms were stored as 1 + w, rounded to fp32.
        off = 2**-23 if family == "gemma3_text" and name.endswith("norm.weight") else 0.0
        assert (hf_value(ours, source.config, name) - value).abs().max() <= off
    assert relative_error(logits_of_ours(ours), logits_of_theirs(theirs)) < TOLERANCE


def hf_value(decoder: Any, config: Any, name: str) -> torch.Tensor:
    from fivefold.model.families import weight_names

    ours = {theirs: own for own, theirs in weight_names(config).items()}[name]
    return decoder.get_parameter(ours)


def test_gemma3_has_a_global_layer_after_five_local_ones(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    theirs = make_theirs("gemma3_text", layer_types=kinds, num_hidden_layers=7)
    path = write(tmp_path / "model.gguf", "gemma3_text", theirs)
    assert relative_error(logits_of_ours(load_decoder(path)), logits_of_theirs(theirs)) < TOLERANCE


def test_a_llama_file_with_a_window_is_mistral(tmp_path: Path) -> None:
    theirs = make_theirs("mistral")
    path = write(tmp_path / "model.gguf", "mistral", theirs, architecture="llama")
    assert open_source(path).config == parse_config(theirs.config.to_dict())
    assert relative_error(logits_of_ours(load_decoder(path)), logits_of_theirs(theirs)) < TOLERANCE


def test_llama3_scaling_is_recovered_from_its_table(tmp_path: Path) -> None:
    theirs = make_theirs("llama", rope_parameters=LLAMA3 | {"rope_theta": 500_000.0})
    factors = theirs.model.rotary_emb.inv_freq
    plain = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
    tables = {"rope_freqs.weight": plain / factors}  # what transformers divides by
    assert torch.allclose(tables["rope_freqs.weight"], llama3_factors(500_000.0, 16, LLAMA3))
    path = write(tmp_path / "model.gguf", "llama", theirs, tables=tables)
    config = open_source(path).config
    assert config == parse_config(theirs.config.to_dict())
    assert config.ropes[0].kind == "llama3" and config.ropes[0].factor == 8.0
    assert relative_error(logits_of_ours(load_decoder(path)), logits_of_theirs(theirs)) < TOLERANCE
    odd = {"rope_freqs.weight": torch.linspace(1, 8, 8)}
    path = write(tmp_path / "odd.gguf", "llama", theirs, tables=odd)
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight that is not Llama 3's"):
        open_source(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_that_the_metadata_names(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    scaling |= {"original_max_position_embeddings": 32} if kind == "yarn" else {}
    theirs = make_theirs("qwen2", rope_parameters=scaling)
    metadata = {"ARCH.rope.scaling.type": kind, "ARCH.rope.scaling.factor": 4.0}
    if kind == "yarn":
        metadata["ARCH.rope.scaling.original_context_length"] = 32
    path = write(tmp_path / "model.gguf", "qwen2", theirs, metadata=metadata)
    assert relative_error(logits_of_ours(load_decoder(path)), logits_of_theirs(theirs)) < TOLERANCE


@pytest.mark.parametrize("type", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_quantized_files(type: Type, dtype: torch.dtype | None, tmp_path: Path) -> None:
    theirs = make_theirs("llama")
    path = write(tmp_path / "model.gguf", "llama", theirs, type=type)
    source = open_source(path)
    value = theirs.model.layers[0].self_attn.v_proj.weight.detach().numpy()
    expected = torch.from_numpy(
        np.array(gguf.quants.dequantize(gguf.quants.quantize(value, type), type))
    )
    read = source.get("layers.0.attention.value.weight", dtype)
    assert torch.equal(read, expected.view(value.shape).to(read.dtype))
    plain = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}.get(type, torch.float32)
    assert read.dtype == (dtype or plain)
    # Quantizing rows and putting them in another order are the same either way around.
    key = theirs.model.layers[0].self_attn.k_proj.weight.detach().numpy()
    expected = torch.from_numpy(
        np.array(gguf.quants.dequantize(gguf.quants.quantize(key, type), type))
    )
    read = source.get("layers.0.attention.key.weight", torch.float32)
    assert torch.equal(read, expected.view(key.shape))
    load_decoder(path, dtype=dtype or torch.float32)


def test_norms_of_gemma_are_restored_before_rounding(tmp_path: Path) -> None:
    """A norm near 1 + w, rounded to bf16 first, would lose most of a small w."""
    theirs = make_theirs("gemma3_text")
    path = write(tmp_path / "model.gguf", "gemma3_text", theirs)
    norm = theirs.model.norm.weight
    read = open_source(path).get("norm.weight", torch.bfloat16)
    assert torch.equal(read, (norm + 1 - 1).to(torch.bfloat16))


# Spoiled files: bytes are changed, or the file is written with something else in it.


def spoiled(path: Path, change: Callable[[bytes], bytes]) -> Path:
    write(path, "llama")
    path.write_bytes(change(path.read_bytes()))
    return path


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is no GGUF file"),
    "other": (lambda data: b"GGML" + data[4:], "is no GGUF file"),
    "counts cut": (lambda data: data[:10], "is truncated: its header goes on beyond byte 10"),
    "metadata cut": (lambda data: data[:200], "is truncated: its header goes on beyond byte 200"),
    "table cut": (lambda data: data[:1200], "is truncated: its header goes on beyond byte 1200"),
    "tensor cut": (lambda data: data[:-100], "is truncated: output_norm.weight ends at byte"),
    "version": (lambda data: b"GGUF\x01\0\0\0" + data[8:], "header at byte 8: version 1"),
    "big-endian": (lambda data: b"GGUF\0\0\0\x03" + data[8:], "big-endian files are not read"),
    "text length": (
        replace(b"\x05\0\0\0\0\0\0\0llama", b"\xff" * 8 + b"llama"),
        "is truncated: its header goes on",
    ),
    "no utf-8": (replace(b"llama.context", b"\xff\xfeama.context"), "is corrupt: header at byte"),
    "type": (
        replace(b"block_count\x04\0\0\0", b"block_count\x63\0\0\0"),
        "99 is not a valid GGUFValueType",
    ),
    "dims": (
        replace(b"token_embd.weight\x02", b"token_embd.weight\x42"),
        "token_embd.weight has 66 dims",
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    change, message = BYTES[case]
    path = spoiled(tmp_path / "model.gguf", change)
    with pytest.raises(WeightsError, match=re.escape(message)) as error:
        open_source(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


METADATA_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "parts": ({"metadata": {"split.count": 3}}, "is one of 3 parts of a model"),
    "architecture": (
        {"architecture": "falcon"},
        "holds the architecture 'falcon', which is not covered",
    ),
    "experts": ({"metadata": {"ARCH.expert_count": 8}}, "has experts"),
    "partial rotary": ({"metadata": {"ARCH.rope.dimension_count": 8}}, "turns 8 of 16 dims"),
    "by layer": (
        {"metadata": {"ARCH.rope.dimension_count": [16, 16, 8]}},
        "varies llama.rope.dimension_count by layer",
    ),
    "alignment": ({"metadata": {"general.alignment": 33}}, "is no power of two"),
    "scaling": (
        {"metadata": {"ARCH.rope.scaling.type": "longrope", "ARCH.rope.scaling.factor": 2.0}},
        "rope scaling 'longrope' is not covered",
    ),
    "scaling factor": (
        {"metadata": {"ARCH.rope.scaling.type": "linear"}},
        "lacks the metadata llama.rope.scaling.factor",
    ),
}


@pytest.mark.parametrize("case", METADATA_CASES)
def test_metadata_that_is_not_covered(case: str, tmp_path: Path) -> None:
    options, message = METADATA_CASES[case]
    path = write(tmp_path / "model.gguf", "llama", **options)
    with pytest.raises(WeightsError, match=re.escape(message)) as error:
        open_source(path)
    assert "\n" not in str(error.value) and error.value.mend


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "lacks 1 of 29 tensors: layers.1.feed_forward.up"),
        ("model.embed_tokens.weight", "lacks the tensor token_embd.weight"),
    ],
)
def test_missing_tensors(drop: str, message: str, tmp_path: Path) -> None:
    theirs = make_theirs("llama")
    state = {name: value for name, value in theirs.named_parameters() if name != drop}
    path = write_gguf(tmp_path / "model.gguf", their_config(theirs), state)
    with pytest.raises(WeightsError, match=re.escape(message)):
        load_decoder(path)


def test_unexpected_tensors_and_shapes(tmp_path: Path) -> None:
    tables = {"blk.0.ffn_gate_inp.weight": torch.zeros(4)}
    path = write(tmp_path / "model.gguf", "llama", tables=tables)
    with pytest.raises(WeightsError, match=r"does not have: blk\.0\.ffn_gate_inp\.weight"):
        load_decoder(path)
    theirs = make_theirs("llama")
    config = their_config(theirs) | {"intermediate_size": 97}
    path = write_gguf(tmp_path / "other.gguf", config, dict(theirs.named_parameters()))
    with pytest.raises(WeightsError, match=re.escape("has shape [96, 64]")):
        load_decoder(path)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    theirs = make_theirs("llama")
    writer_path = write(tmp_path / "model.gguf", "llama", theirs)
    data = writer_path.read_bytes()
    # The type of the first tensor in the table, F32, becomes Q2_K: blocks of 256 over 64 do not fit.
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    writer_path.write_bytes(data[:at] + bytes([10]) + data[at + 1 :])
    with pytest.raises(WeightsError, match="has rows of 64, not whole blocks of 256"):
        open_source(writer_path)
    # IQ4_NL has blocks of 32: the file opens, the tensor cannot be read.
    writer_path.write_bytes(data[:at] + bytes([20]) + data[at + 1 :])
    with pytest.raises(WeightsError, match=r"token_embd.weight in .* is of type IQ4_NL"):
        load_decoder(writer_path)


def test_no_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.kv_data[0].pop("general.architecture")
    writer.add_tensor("w", np.zeros(3, np.float32))
    finish(writer)
    with pytest.raises(WeightsError, match=r"has no general\.architecture"):
        open_source(tmp_path / "model.gguf")


def test_no_tokenizer(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "model.gguf", "llama"))
    assert not source.has_tokenizer
    with pytest.raises(TokenizerError, match=r"has no tokenizer \(looked for tokenizer.ggml"):
        source.tokenizer()


def test_every_byte_cut_off_is_noticed(tmp_path: Path) -> None:
    """Whatever a copy stopped at: an error of ours, never another exception or a wrong model."""
    whole = write(tmp_path / "model.gguf", "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [*range(0, 2200, 7), *range(2200, len(whole) - 32, 9001), len(whole) - 33]:
        path.write_bytes(whole[:end])
        with pytest.raises(FivefoldError):
            open_source(path)
