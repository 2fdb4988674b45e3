"""`fivefold bench kernels`: every operator, what was chosen for it, and one-line errors."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli.bench import measure
from fivefold.cli.main import app
from fivefold.core.errors import ConfigError
from fivefold.kernels import dispatch
from fivefold.kernels.cases import OPERATORS, Case, Sizes, cases
from fivefold.observe.peak import Bandwidth, Peak

SMALL = ["--batch", "1", "--length", "8", "--seconds", "0.001", "--no-peer"]
TINY = Sizes(
    batch=2, length=9, hidden=24, feed_forward=40, heads=4, kv_heads=2, head_dim=6,
    vocabulary=50, experts=3, held=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine is another test's."""
    peak = Peak(1e11, "fp32", "fp32", "a CPU", 1, "2.13", False)
    monkeypatch.setattr("fivefold.observe.peak.measured_peak", lambda *_: peak)
    bandwidth = Bandwidth(1e10, "a CPU", 1, "2.13", False)
    monkeypatch.setattr("fivefold.observe.peak.measured_bandwidth", lambda *_: bandwidth)


def run(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["bench", "kernels", *SMALL, *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_operators_are_measured_and_named(dtype: str) -> None:
    ops = ["linear", "packed_linear", "rms_norm", "flash_attention", "paged_attention"]
    found = run("--dtype", dtype, *(word for op in ops for word in ("--op", op)))
    assert {row["op"] for row in found} == set(ops)
    for row in found:
        assert row["implementation"] in ("torch", "native", "triton")
        assert row["why"]
        assert math.isfinite(row["microseconds"])  # type: ignore[arg-type]
        assert row["microseconds"] > 0  # type: ignore[operator]


def test_the_policy_is_seen() -> None:
    assert run("--op", "linear")[0]["implementation"] == "torch"
    chosen = run("--op", "linear", "--deterministic")[0]["implementation"]
    assert (
        chosen == dispatch._choose("linear", "cpu", torch.float32, True, True, None).implementation
    )
    assert not dispatch.is_deterministic()


def test_a_table_for_people() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *SMALL, "--op", "rms_norm"])
    assert result.exit_code == 0
    assert "reached" in result.output
    assert "rms_norm: " in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "rms_nrom"], "did you mean 'rms_norm'"),
        (["--dtype", "fp23"], "did you mean 'fp32'"),
        (["--device", "tpu"], "no device 'tpu' here"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_and_torchs_compute_the_same(dtype: torch.dtype) -> None:
    """A case whose two sides differ would compare nothing."""
    torch.manual_seed(0)
    compared = set()
    for case in cases(TINY, dtype, "cpu", OPERATORS):
        ours, theirs = case.run(), case.peer() if case.peer is not None else None
        ours = ours[0] if isinstance(ours, tuple) else ours
        theirs = torch.cat(theirs) if isinstance(theirs, list) else theirs
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            if case.op == "flash_attention":
                theirs = theirs.transpose(1, 2)
            theirs = theirs.reshape(ours.shape)
            loose = 0.2 if "int8" in case.what else 0.05
            torch.testing.assert_close(ours, theirs, rtol=loose, atol=loose)
            compared.add(case.op)
    assert len(compared) >= (7 if dtype == torch.float32 else 5)


@pytest.mark.parametrize("native", [False, True])
def test_peers_that_would_take_minutes_are_left_out(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "NATIVE_ON_CPU", frozenset({torch.bfloat16} if native else ()))
    found = {case.op: case.peer for case in cases(TINY, torch.bfloat16, "cpu", OPERATORS)}
    assert (found["cross_entropy"] is not None) == native
    assert found["rms_norm"] is not None
    alone = cases(TINY, torch.float32, "cpu", ["linear"])
    assert next(alone).peer is not None


def test_the_share_of_the_bound_is_that_of_the_nearer_one() -> None:
    case = Case("rms_norm", "", torch.float32, 0.0, 1e6, lambda: None)
    peak = Peak(1e11, "fp32", "fp32", "a CPU", 1, "2.13", False)
    found = measure(case, "cpu", peak, Bandwidth(1e10, "a CPU", 1, "2.13", False), 0.001)
    assert found.bound == "memory"
    assert found.of_bound == pytest.approx(1e6 / 1e10 / (found.microseconds * 1e-6))
    assert found.against_torch is None
