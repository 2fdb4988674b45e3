"""Quantized blocks: held to the gguf package, to the format's own words, and to ggml's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_cases import finish

from fivefold.weights.gguf_dequantize import read_stored
from fivefold.weights.gguf_header import read_header
from fivefold.weights.mapped_file import MappedFile

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]
K_TYPES = [Type.Q4_K, Type.Q5_K, Type.Q6_K]


def stored_file(path: Path, blocks: np.ndarray, type: Type) -> tuple[MappedFile, Any]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.zeros(3, np.float32))
    writer.add_tensor("w", blocks, raw_dtype=type)
    finish(writer)
    file = MappedFile(path)
    return file, read_header(file).tensors["w"]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_gguf_package(type: Type, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sizes beyond one part, which is what is dequantized at a time."""
    values = np.random.default_rng(0).normal(size=(70, 1024)).astype(np.float32)
    blocks = gguf.quants.quantize(values, type)
    file, stored = stored_file(tmp_path / "w.gguf", blocks, type)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, type)).reshape(70, 1024))
    read = read_stored(file, stored, dtype)
    assert read.dtype == dtype
    assert torch.equal(read, expected.to(dtype))


@pytest.mark.parametrize("type", [*TYPES[3:], *K_TYPES])
def test_any_bytes_equal_the_gguf_package(type: Type, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[type]
    rows, count = 5, 7
    blocks = np.random.default_rng(1).integers(0, 256, (rows, count * size), dtype=np.uint8)
    # The scales' exponents stay in the range of numbers.
    for start in scales_at(type):
        blocks.reshape(rows * count, size)[:, start + 1] &= 0xBB
    file, stored = stored_file(tmp_path / "w.gguf", blocks, type)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, type))
    assert expected.shape == (rows, count * block) and expected.isfinite().all()
    assert torch.equal(read_stored(file, stored, None), expected)


def scales_at(type: Type) -> list[int]:
    """Where in a block its fp16 numbers lie."""
    if type == Type.Q6_K:
        return [208]
    two = type in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
    return [0, 2] if two else [0]


# One value of a block in the words of the format (ggml-quants.c), one at a time and in Python.


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def nibble(byte: int, high: bool) -> int:
    return byte >> 4 if high else byte & 15


def q8_0(block: bytes, i: int) -> float:
    return half(block, 0) * int.from_bytes(block[2 + i : 3 + i], signed=True)


def q4_0(block: bytes, i: int) -> float:
    return half(block, 0) * (nibble(block[2 + i % 16], i >= 16) - 8)


def q4_1(block: bytes, i: int) -> float:
    return half(block, 0) * nibble(block[4 + i % 16], i >= 16) + half(block, 2)


def q5_0(block: bytes, i: int) -> float:
    fifth = int.from_bytes(block[2:6], "little") >> i & 1
    return half(block, 0) * (nibble(block[6 + i % 16], i >= 16) + 16 * fifth - 16)


def q5_1(block: bytes, i: int) -> float:
    fifth = int.from_bytes(block[4:8], "little") >> i & 1
    return half(block, 0) * (nibble(block[8 + i % 16], i >= 16) + 16 * fifth) + half(block, 2)


def scale_and_minimum(scales: bytes, group: int) -> tuple[int, int]:
    """`get_scale_min_k4`: eight pairs of six bits in twelve bytes."""
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    low, top, top_minimum = scales[group + 4], scales[group - 4], scales[group]
    return low & 15 | top >> 6 << 4, low >> 4 | top_minimum >> 6 << 4


def q4_k(block: bytes, i: int) -> float:
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    quant = nibble(block[16 + i // 64 * 32 + i % 32], i // 32 % 2 == 1)
    return half(block, 0) * scale * quant - half(block, 2) * minimum


def q5_k(block: bytes, i: int) -> float:
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    fifth = block[16 + i % 32] >> (i // 32) & 1
    quant = nibble(block[48 + i // 64 * 32 + i % 32], i // 32 % 2 == 1) + 16 * fifth
    return half(block, 0) * scale * quant - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    part, place = divmod(i, 128)
    quarter, column = divmod(place, 32)
    low = nibble(block[part * 64 + quarter % 2 * 32 + column], quarter >= 2)
    high = block[128 + part * 32 + column] >> (2 * quarter) & 3
    scale = int.from_bytes(block[192 + i // 16 : 193 + i // 16], signed=True)
    return half(block, 208) * scale * ((low | high << 4) - 32)


WORDS: dict[Type, Callable[[bytes, int], float]] = {
    Type.Q8_0: q8_0,
    Type.Q4_0: q4_0,
    Type.Q4_1: q4_1,
    Type.Q5_0: q5_0,
    Type.Q5_1: q5_1,
    Type.Q4_K: q4_k,
    Type.Q5_K: q5_k,
    Type.Q6_K: q6_k,
}


@pytest.mark.parametrize("type", WORDS)
def test_equals_the_words_of_the_format(type: Type, tmp_path: Path) -> None:
    """Handmade blocks: every byte another, the fp16 numbers short ones."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    data = bytearray((37 * i + 11) % 256 for i in range(3 * size))
    for start in range(0, len(data), size):
        for place, value in zip(scales_at(type), (0.25, -1.5), strict=False):
            data[start + place : start + place + 2] = np.float16(value).tobytes()
    blocks = np.frombuffer(bytes(data), np.uint8).reshape(1, -1)
    file, stored = stored_file(tmp_path / "w.gguf", blocks, type)
    read = read_stored(file, stored, torch.float32).flatten()
    expected = [
        WORDS[type](bytes(data[start : start + size]), i)
        for start in range(0, len(data), size)
        for i in range(block)
    ]
    assert read.tolist() == expected  # products and sums of few bits: exact in fp32 as in fp64


# 256 values v(i) = sin(0.7 i) (0.2 + 1.8 i / 255) + 0.1, quantized by ggml 0.25.3, and what its
# own `dequantize_row_*` makes of them: the first eight, and the sum.
GGML_BLOCKS: dict[Type, tuple[str, str, float]] = {
    Type.Q4_K: (
        "491c10278dd3dae38ad2d7e1aa3084ff57392b4a88c5d3c294572a1c4b89c5e2d193571b1d3c89d4f1e093470c0e"
        "3d891b1d4c88c4d1c183481c1d4c88c4e0c083380c1e4c88d3e0c083380d0f4d98d32d5c98d4e1c184391d1e5ca8"
        "d3e1c184390d1e5ca8e3f0c184390d1e5ca8e3f05ca7d3e0b1652a0e1f5ca7d3e0b1652a0e1f5ca7e2e0b1652b0f"
        "1f5ca7e2e0b1",
        "0.10493087768554688 0.21373367309570312 0.3225364685058594 0.26813507080078125 "
        "0.159332275390625 -0.003871917724609375 -0.11267471313476562 -0.16707611083984375",
        28.044349670410156,
    ),
    Type.Q5_K: (
        "1d1892278cd3dae18991d7df89f197ff54d5b5adab2a6a5a5654d5b5adab2a4a5a565595b5adab2a4a5a565595b5"
        "adabbf655897128cc6a538af473b8913abe4b237a0281d7b14b9f2d046901a0f7d24383c9922a9d3a22881292d8a"
        "22b8e2a117711a1e8b32c7f0b017720b0f8c32d73da931b8d2830a731b3eaa41b7d292f9641c2eaa41c7e192f954"
        "0d2faa50d6f0c950c7d284eb551d4ec960d6e184ec561e3fc96fd6e183ec460e3fca7fe5f083",
        "0.09537506103515625 0.23998260498046875 0.312286376953125 0.28818511962890625 "
        "0.1676788330078125 0.0230712890625 -0.1215362548828125 -0.14563751220703125",
        28.742815017700195,
    ),
    Type.Q6_K: (
        "a83d8668815f69bc8587096164a0718ead96992b8487a3627fb18878087083b2535ea0889a3b9498b57571a38a79"
        "198197c57673a47a791880a5d59886b76b58b1e92ace89883a3605b0f83bdf9b892a4616c1093ccf8a782a350"
        "5c0094cd08c67294525d11a3dc07b68293414d01a4dd07a67182515d12b5ee18b68081404d0c9c88c582531326296"
        "c9cc8c582532326296c9cc8c582532326396c9cc8c58258c58353233a3d6cdcc8c58353233a3d6cdcc8c68353233"
        "a3d6cdcc8c68353333e7e0d6d3cbc3b9b5b0a8a097958c8280f80f",
        "0.0972747802734375 0.23102760314941406 0.3161430358886719 0.2918243408203125 "
        "0.1823902130126953 0.012159347534179688 -0.10943412780761719 -0.14591217041015625",
        28.727188110351562,
    ),
}


@pytest.mark.parametrize("type", GGML_BLOCKS)
def test_blocks_that_ggml_made(type: Type, tmp_path: Path) -> None:
    text, first, total = GGML_BLOCKS[type]
    blocks = np.frombuffer(bytes.fromhex(text), np.uint8).reshape(1, -1)
    file, stored = stored_file(tmp_path / "w.gguf", blocks, type)
    read = read_stored(file, stored, torch.float32).flatten()
    assert read[:8].tolist() == [float(number) for number in first.split()]
    assert read.double().sum().item() == total
    original = [math.sin(0.7 * i) * (0.2 + 1.8 * i / 255) + 0.1 for i in range(256)]
    # Half a step of the coarsest group: the values were of this size to begin with.
    assert np.abs(read.numpy() - original).max() < {"Q4_K": 0.12, "Q5_K": 0.06}.get(type.name, 0.03)
