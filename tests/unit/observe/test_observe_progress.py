"""The progress line: fits the terminal, is plain elsewhere, silent where it should be."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import step_records
from rich.cells import cell_len
from rich.console import Console

from fivefold.observe import progress
from fivefold.observe.progress import TrainProgress, progress_line


def shown(
    steps: int, *, terminal: bool, enabled: bool = True, notes: bool = False, width: int = 100
) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    with TrainProgress(steps, enabled=enabled, console=console) as line:
        for row in step_records(steps):
            line.update(row)
            if notes and row["step"] == 2:
                line.note("step 2: held-out loss 4.2 [bold]")
    return file.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(200, terminal=False, notes=True)
    assert "\x1b" not in text and "\r" not in text
    first, note, last = text.splitlines()  # 200 quick steps: only the first and the last
    assert first.startswith("step 1/200, loss ") and last.startswith("step 200/200, loss ")
    assert note == "step 2: held-out loss 4.2 [bold]"  # printed as it is, not as markup
    for part in ("|g| ", "lr ", " tok/s", "MFU ", "MiB", "ETA "):
        assert part in last
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    assert len(shown(20, terminal=False).splitlines()) == 20


def test_one_living_line_on_a_terminal() -> None:
    text = shown(5, terminal=True, notes=True)
    assert "step 5/5" in text and "held-out loss 4.2 [bold]" in text
    # The cursor is shown again at once: a run that is killed could not do it later.
    assert text.index("\x1b[?25h") < text.index("step 1/5")


def test_a_terminal_that_is_not_utf_8() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    console = Console(file=file, force_terminal=True, width=120)
    with TrainProgress(3, console=console) as line:
        for row in step_records(3):
            line.update(row)
    file.flush()
    assert b"step 3/3" in file.buffer.getvalue()  # type: ignore[attr-defined]


def test_silent_when_disabled_or_not_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(5, terminal=False, enabled=False, notes=True) == ""
    assert shown(5, terminal=True, enabled=False, notes=True) == ""
    monkeypatch.setenv("RANK", "1")
    assert shown(5, terminal=True, notes=True) == shown(5, terminal=False, notes=True) == ""


def test_a_last_step_that_was_not_shown_is_shown_at_the_end() -> None:
    file = io.StringIO()
    with TrainProgress(1000, console=Console(file=file, force_terminal=False, width=80)) as line:
        for row in step_records(7):
            line.update(row)
    assert [text.split(",")[0] for text in file.getvalue().splitlines()] == [
        "step 1/1000",
        "step 7/1000",
    ]


def test_values_that_are_absent_or_not_finite() -> None:
    line = progress_line({"step": 3, "loss": math.nan, "mfu": None}, 10, None, 200)
    assert line.endswith("step 3/10  loss nan")


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(1, 10**7), st.floats(0, 1e9), st.floats(0, 1e6), st.floats(0, 1e12),
    st.integers(10, 240), st.none() | st.floats(0, 1e8),
)  # fmt: skip
def test_the_line_fits_its_width(
    step: int, loss: float, norm: float, rate: float, width: int, eta: float | None
) -> None:
    row = {"step": step, "loss": loss, "grad_norm": norm, "lr": 3e-4, "tokens_per_second": rate,
           "mfu": 0.41, "memory_bytes": 3 * 2**30}  # fmt: skip
    line = progress_line(row, 10**7, eta, width)
    assert cell_len(line) <= width
    if width >= 60:
        assert f"step {step}/10000000" in line
        assert eta is None or "ETA " in line  # whatever else is left out
    if width >= 130:
        assert "█" in line or "░" in line


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    line = TrainProgress(100, console=Console(file=io.StringIO(), force_terminal=False))
    line._enabled, line._shown = True, math.inf  # never draws, so one look at the clock a step
    for step in range(11, 21):
        line.update({"step": step, "step_seconds": 1.5})
    # Nine intervals of 2 s and the first step's own 1.5 s, for ten steps; 80 are left.
    assert line._eta() == pytest.approx(80 * (9 * 2 + 1.5) / 10)
