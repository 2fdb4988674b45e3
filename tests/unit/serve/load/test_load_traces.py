"""Traces: the real samples, what they share, and lines that are wrong."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest

from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.material import TokenIds, Words, common_words
from fivefold.engines.serve.load.traces import (
    AZURE_COLUMNS,
    MOONCAKE_BLOCK,
    TraceRow,
    read_azure,
    read_mooncake,
)
from fivefold.engines.serve.load.workload import Fit, from_trace

AZURE_HEAD = ",".join(AZURE_COLUMNS) + "\n"
GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}


@pytest.fixture(scope="module")
def azure(shared_data: Path) -> Path:
    return shared_data / "azure-llm-trace-2023" / "AzureLLMInferenceTrace_conv.csv"


@pytest.fixture(scope="module")
def mooncake(shared_data: Path) -> Path:
    return shared_data / "mooncake-trace" / "synthetic_trace.jsonl"


def test_the_azure_sample(azure: Path) -> None:
    rows = read_azure(azure)
    with azure.open() as file:
        raw = list(csv.reader(file))[1:]
    assert len(rows) == len(raw) == 19_366
    assert sum(row.input_tokens for row in rows) == sum(int(fields[1]) for fields in raw)
    assert sum(row.output_tokens for row in rows) == sum(int(fields[2]) for fields in raw)
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert rows[1].at == pytest.approx(50.9951690 - 46.6805900, abs=1e-6)
    assert (rows[-1].input_tokens, rows[-1].output_tokens) == (197, 183)
    assert all(a.at <= b.at for a, b in itertools.pairwise(rows))
    assert 3000 < rows[-1].at < 3600  # about an hour


def test_the_mooncake_sample(mooncake: Path) -> None:
    rows = read_mooncake(mooncake)
    raw = [json.loads(line) for line in mooncake.read_text().splitlines()]
    assert len(rows) == len(raw) == 3_993
    assert rows[0] == TraceRow(0.0, 40_160, 6, tuple(range(79)))
    assert sum(len(row.blocks) for row in rows) == sum(len(r["hash_ids"]) for r in raw)
    assert rows[-1].at == pytest.approx((raw[-1]["timestamp"] - raw[0]["timestamp"]) / 1000)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_prompts_share_what_the_trace_shares(mooncake: Path, scale: float) -> None:
    """Common beginnings of prompts are as long as those of their hash_ids, and no longer."""
    rows = read_mooncake(mooncake)
    rows = sorted(rows[:1200], key=lambda row: row.blocks)[:60]
    asked = from_trace(rows, Fit(scale))
    material = TokenIds(50_000, seed=5)
    prompts = [material.prompt(each.parts) for each in asked]
    block = -(-MOONCAKE_BLOCK * scale // 1)
    shared = 0
    for (a, p), (b, q) in zip(
        zip(rows, prompts, strict=True), list(zip(rows, prompts, strict=True))[1:], strict=False
    ):
        assert len(p) == max(1, round(a.input_tokens * scale))
        expected = min(common(a.blocks, b.blocks) * block, len(p), len(q))
        assert common(p, q) == expected
        shared += expected > 0
    assert shared > 5  # or the sample tells nothing


def test_texts_share_as_well(mooncake: Path) -> None:
    rows = [TraceRow(0.0, 1100, 3, (1, 2, 3)), TraceRow(0.0, 900, 3, (1, 2)),
            TraceRow(0.0, 1100, 3, (4, 2, 3))]  # fmt: skip
    words = [Words(1, common_words).prompt(each.parts).split() for each in from_trace(rows, Fit())]
    assert common(words[0], words[1]) == 900
    assert common(words[0], words[2]) < 5
    assert words[0][512:900] == words[2][512:900]


def common(a: object, b: object) -> int:
    pairs = enumerate(zip(a, b, strict=False))  # type: ignore[call-overload]
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("", "line 1 is '', no Azure trace"),
        ("a,b\n", "line 1 is 'a,b', no Azure trace"),
        (AZURE_HEAD, "holds no request"),
        (AZURE_HEAD + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,12\n", "line 3 has 2 fields"),
        (AZURE_HEAD + "yesterday,1,2\n", "line 2 has no time: 'yesterday'"),
        (AZURE_HEAD + "2023-11-16 18:15:46,x,2\n", "line 2 has ContextTokens 'x'"),
        (AZURE_HEAD + "2023-11-16 18:15:46,3,-2\n", "line 2 has GeneratedTokens '-2'"),
        (AZURE_HEAD + "2023-11-16 18:15:46.5x,3,2\n", "line 2 has no time"),
    ],
)  # fmt: skip
def test_azure_lines_that_are_wrong(tmp_path: Path, content: str, wanted: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(LoadError) as error:
        read_azure(path)
    assert wanted in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{oh", "line 2 is not JSON"),
        ("[1]", "line 2 has no timestamp"),
        (json.dumps({"timestamp": 1}), "line 2 has no input_length"),
        (json.dumps(GOOD | {"timestamp": "x"}), "line 2 has timestamp 'x'"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "line 2 has timestamp nan"),
        (json.dumps(GOOD | {"input_length": 1.5}), "line 2 has input_length 1.5"),
        (json.dumps(GOOD | {"output_length": None}), "line 2 has output_length None"),
        (json.dumps(GOOD | {"hash_ids": [1, "2"]}), "line 2 has hash_ids that are no list"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "line 2 has 1 hash_ids, too few for 700 tokens"),
    ],
)
def test_mooncake_lines_that_are_wrong(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(LoadError) as error:
        read_mooncake(path)
    assert wanted in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 9)
    for read in (read_azure, read_mooncake):
        with pytest.raises(LoadError, match=r"cannot read .*absent: No such file"):
            read(tmp_path / "absent")
        with pytest.raises(LoadError, match="binary is no UTF-8 text"):
            read(tmp_path / "binary")


def test_lengths_are_scaled_then_cut() -> None:
    rows = [TraceRow(0.0, 1000, 100, ()), TraceRow(3.0, 4000, 4, ())]
    asked = from_trace(rows, Fit(0.1, max_input=250, max_output=8), speed=2.0)
    assert [(a.input_tokens, a.output_tokens, a.at) for a in asked] == [
        (100, 8, 0.0),
        (250, 1, 1.5),
    ]
    fit = Fit(0.1, max_input=250, max_output=8)
    assert [fit.cuts(row) for row in rows] == [True, True]
    assert not Fit(0.1).cuts(rows[0])
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(LoadError, match="a length scale of"):
            Fit(wrong)
        with pytest.raises(LoadError, match="a speed of"):
            from_trace(rows, Fit(), wrong)
