"""Axes, ticks, and the numbers people read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.observe import format as as_text
from fivefold.observe.axis import linear_axis, log_axis, step_axis, value_text

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)
VALUES = st.floats(-1e15, 1e15).filter(lambda v: v == 0 or abs(v) > 1e-12)


@SETTINGS
@given(VALUES, VALUES, st.sampled_from(["number", "count", "share", "bytes"]), st.booleans())
def test_a_linear_axis_covers_its_values(one: float, other: float, kind: str, zero: bool) -> None:
    low, high = sorted((one, other))
    if 0 < high - low < 1e-6 * max(abs(low), abs(high)):
        return  # closer than labels can tell
    axis = linear_axis(low, high, kind, from_zero=zero)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= low <= high <= axis.high + slack
    assert -1e-6 <= axis.place(low) <= axis.place(high) <= 1 + 1e-6
    places = [value for value, _ in axis.ticks]
    assert 2 <= len(places) <= 12 and places == sorted(places)
    labels = [label for _, label in axis.ticks]
    assert len(set(labels)) == len(labels)
    if zero:
        assert axis.low <= 0 <= axis.high


@SETTINGS
@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_a_step_axis_has_whole_steps(first: int, length: int) -> None:
    axis = step_axis(first, first + length)
    assert axis.place(first) >= 0 and axis.place(first + length) <= 1
    assert 1 <= len(axis.ticks) <= 12
    assert all(value == int(value) and axis.low <= value <= axis.high for value, _ in axis.ticks)
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


@SETTINGS
@given(st.floats(1e-9, 1e9), st.floats(30, 1e9))
def test_a_log_axis_covers_its_values(low: float, factor: float) -> None:
    axis = log_axis(low, low * factor)
    assert 0 <= axis.place(low) < axis.place(low * factor) <= 1
    assert 1 <= len(axis.ticks) <= 12
    assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)


def test_labels_are_short() -> None:
    assert [label for _, label in linear_axis(0, 1.3 * 2**30, "bytes").ticks] == [
        "0", "0.5 GiB", "1.0 GiB", "1.5 GiB",
    ]  # fmt: skip
    assert [label for _, label in linear_axis(0, 0.43, "share").ticks] == [
        "0", "10%", "20%", "30%", "40%", "50%",
    ]  # fmt: skip
    assert [label for _, label in linear_axis(0, 3e-4, "number").ticks] == [
        "0", "1e-4", "2e-4", "3e-4",
    ]  # fmt: skip
    assert [label for _, label in linear_axis(0, 23_000, "count").ticks][-1] == "25K"
    assert [label for _, label in step_axis(1, 100_000).ticks] == [
        "20K",
        "40K",
        "60K",
        "80K",
        "100K",
    ]
    assert [label for _, label in step_axis(7, 7).ticks] == ["7"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (as_text.number(0), "0"), (as_text.number(2.94217), "2.942"),
        (as_text.number(12345.678), "12,346"), (as_text.number(3e-4), "3.000e-4"),
        (as_text.number(1.5e9), "1,500,000,000"), (as_text.number(float("nan")), "nan"),
        (as_text.number(-0.5), "-0.5000"), (as_text.scientific(3e-3, 2), "3.00e-3"),
        (as_text.count(7677), "7,677"), (as_text.count(12_345), "12.3K"),
        (as_text.count(4.08e8), "408M"), (as_text.count(2e12), "2T"),
        (as_text.count(999_999), "1M"), (as_text.size(0), "0 B"), (as_text.size(1023), "1023 B"),
        (as_text.size(970 * 2**20), "970 MiB"), (as_text.size(5.25 * 2**30), "5.25 GiB"),
        (as_text.duration(0.4), "0 s"), (as_text.duration(66), "1:06"),
        (as_text.duration(7509), "2:05:09"), (as_text.duration(273_900), "3 d 04:05"),
        (as_text.share(0.4127), "41.3%"), (value_text(0.5, "share"), "50.0%"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(text: str, wanted: str) -> None:
    assert text == wanted


def test_times_are_told_in_their_unit() -> None:
    assert [as_text.latency(v) for v in (0, 3.4e-4, 0.0417, 0.9999, 3.214, 119.9, 187)] == [
        "0 s", "340 µs", "41.7 ms", "1.00 s", "3.21 s", "120 s", "3:07",
    ]  # fmt: skip
    assert value_text(0.05, "seconds") == "50.0 ms"
    for high, last in ((0.0004, "400 µs"), (0.43, "500 ms"), (7.3, "8 s"), (1200, "20 min")):
        assert linear_axis(0, high, "seconds", from_zero=True).ticks[-1][1] == last
    labels = [label for _, label in log_axis(0.02, 2, "seconds").ticks]
    assert labels == ["20 ms", "50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s"]


@SETTINGS
@given(st.floats(1e-6, 1e5), st.floats(0, 0.99))
def test_an_axis_of_times_covers_its_values(high: float, share: float) -> None:
    axis = linear_axis(high * share, high, "seconds", from_zero=True)
    assert axis.low <= high * share <= high <= axis.high * (1 + 1e-6)
    assert len({label for _, label in axis.ticks}) == len(axis.ticks) >= 2
