"""A damaged safetensors file is refused, by name of file, tensor and byte."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from fivefold.core.errors import WeightsError
from fivefold.weights.safetensors_file import SafetensorsFile

TENSORS = {
    "first": torch.arange(6.0).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "second": torch.arange(4.0, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(3.0),
}
WHOLE = save(TENSORS)


def with_header(header: Any, data: bytes = bytes(100)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_reads_what_the_library_writes(dtype: torch.dtype | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    file = SafetensorsFile(path)
    assert set(file.placed) == set(TENSORS)
    for name, value in TENSORS.items():
        read = file.read(name, dtype, "cpu")
        assert torch.equal(read, value.to(dtype)) and read.dtype == (dtype or value.dtype)


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    """The format asks for no alignment; views at odd addresses are made whole."""
    path = tmp_path / "odd.safetensors"
    values = torch.tensor([1.5, -2.0])
    header = entry(data_offsets=[3, 11])
    path.write_bytes(with_header(header, b"abc" + values.numpy().tobytes()))
    read = SafetensorsFile(path).read("w", None, "cpu")
    assert torch.equal(read, values) and read.data_ptr() % 4 == 0


# In order of their bytes: second (float64), first, scalar, then half.
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is truncated: 0 bytes hold no header"),
    "short": (WHOLE[:5], "is truncated: 5 bytes hold no header"),
    "header cut": (WHOLE[:40], "is truncated: its header ends at byte"),
    "tensor cut": (
        WHOLE[:-1],
        f"half ends at byte {len(WHOLE)}, but the file has {len(WHOLE) - 1}",
    ),
    "first tensor cut": (WHOLE[:-20], "is truncated: first ends at byte"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", "a header of 1099511627776 bytes"),
    "no json": (with_header(b"{no"), "is corrupt: header: Expecting"),
    "deep json": (with_header(b"[" * 100_000), "is corrupt: header:"),
    "no utf-8": (with_header(b"\xff\xfe"), "is corrupt: header:"),
    "no object": (with_header([1]), "its header is no object"),
    "no entry": (with_header({"w": 3}), "header entry of w"),
    "no shape": (with_header({"w": {"dtype": "F32"}}), "header entry of w: no 'shape'"),
    "negative": (with_header(entry(data_offsets=[-8, 0])), "no whole numbers"),
    "fraction": (with_header(entry(shape=[2.0])), "no whole numbers"),
    "size": (with_header(entry(shape=[3])), "8 bytes for shape [3] in F32, not 12"),
    "beyond": (with_header(entry(data_offsets=[96, 104])), "w ends at byte"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=re.escape(message)) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(entry(dtype="F8_E4M3", data_offsets=[0, 2])))
    with pytest.raises(WeightsError, match=r"w in .* is stored as F8_E4M3"):
        SafetensorsFile(path).read("w", None, "cpu")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot read"):
        SafetensorsFile(tmp_path)
