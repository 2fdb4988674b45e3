"""The report: whole HTML, no request to anywhere, nothing of a run's text becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_runs import make_run, step_records

from fivefold.core.errors import DataError
from fivefold.observe.chart import Across, Chart, Line, Marks, draw
from fivefold.observe.metrics import MetricsWriter
from fivefold.observe.report import write_report
from fivefold.observe.series import curve, downsample, smooth, smoothing_window

VOID = {"meta", "link", "img", "br", "hr", "input", "path", "circle"}
FETCHING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}
HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}<!--"


class Page(HTMLParser):
    """Parses strictly: every element is closed, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def text(self) -> str:
        return " ".join(
            t for tag, ts in self.texts.items() if tag not in ("script", "style") for t in ts
        )

    def data(self) -> list[dict[str, Any]]:
        return json.loads(self.texts["script"][0])

    def titles(self) -> list[str]:
        return [chart["title"].split(" (")[0] for chart in self.data()]


def check(path: Path) -> Page:
    """What holds for every report."""
    page = Page(path)
    for tag, attributes in page.tags:
        assert not FETCHING & attributes.keys(), f"<{tag}> fetches"
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
    style, script = page.texts["style"][0], page.texts["script"][1]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"fetch|XMLHttpRequest|import\(|WebSocket|eval|innerHTML", script)
    assert page.count("script") == 2 and page.count("style") == 1
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    drawn = re.findall(r"<svg.*?</svg>", page.html, re.DOTALL)
    assert len(drawn) == len(page.data()) == page.count("figure")
    for svg in drawn:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    return page


@pytest.mark.parametrize("steps", [1, 2, 12, 300, 20_000])
def test_runs_of_any_length(tmp_path: Path, steps: int) -> None:
    path = write_report(make_run(tmp_path / "a run", steps))
    assert path == tmp_path / "a run" / "report.html"
    page = check(path)
    assert page.titles() == [
        "Loss", "Throughput", "MFU", "Gradient norm before clipping", "Learning rate",
        "Peak memory of rank 0",
    ]  # fmt: skip
    assert f"finished: {steps:,} of {steps:,} steps" in page.text()
    assert path.stat().st_size < 500_000
    for chart in page.data():
        for line in chart["lines"]:
            assert 0 < len(line["points"]) <= 4 * 280
            for x, y, step, text in line["points"]:
                assert 0 <= x <= 600 and 0 <= y <= 260 and 1 <= step <= steps and text
    assert {line["label"] for line in page.data()[0]["lines"]} >= {"train", "held-out"}
    assert not list(path.parent.glob("*.partial"))


def test_the_numbers_on_top(tmp_path: Path) -> None:
    page = check(write_report(make_run(tmp_path / "run", 120)))
    last = list(step_records(120))[-1]
    text = re.sub(r"\s+", " ", page.text())
    assert f"{last['loss']:.3f}" in text and f"{last['loss'] + 0.15:.3f}" in text
    assert "970 MiB" in text and "resumed once" in text and "layout dp_shard=2,zero=3" in text
    assert "2026-09-21 14:13:20 UTC" in text and "train.global_batch" in text
    resumes = [a for t, a in page.tags if t == "path" and a.get("class") == "resume"]
    assert len(resumes) == 6  # once on each chart


def test_a_run_that_met_a_nan_says_so(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for row in step_records(40):
            nan = {"loss": float("nan"), "grad_norm": float("inf")} if row["step"] == 40 else {}
            writer.write(row | nan)
    (tmp_path / "config.yaml").write_text("train: {steps: 100}")
    page = check(write_report(tmp_path))
    assert "stopped: the loss was not finite at step 40 of 100" in page.text()
    assert "not-finite" in {a.get("class") for t, a in page.tags if t == "path"}
    assert page.data()[0]["lines"][0]["points"][-1][2] == 39


def test_missing_keys_and_odd_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 3, "loss": 2.0}, {"step": 4, "loss": "much", "mfu": True},
        {"step": "five", "loss": 1.0}, {"loss": 1.0}, {"step": 6, "loss": [1], "lr": None},
        {"step": 9, "loss": 1.5, "loss_scale": 65536.0},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = check(write_report(tmp_path))
    assert page.titles() == ["Loss", "Loss scale"]
    assert [p[2] for p in page.data()[0]["lines"][0]["points"]] == [3, 9]
    text = re.sub(r"\s+", " ", page.text())
    assert "Not recorded in this run: Throughput" in text and "Learning rate" in text
    assert "at step 9: running, or killed" in text


def test_a_run_without_a_single_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert check(write_report(tmp_path)).data() == []


def test_a_live_or_killed_run_with_torn_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 30)
    for name in ("metrics.jsonl", "evaluations.jsonl", "events.jsonl"):
        path = run / name
        path.write_bytes(path.read_bytes()[:-9])
    (run / "config.yaml").write_bytes(b"train: {steps: \xff\n- [")
    page = check(write_report(run))
    assert "at step 29: running, or killed" in page.text()


def test_text_of_a_run_never_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / '<b>run & "more"\''
    make_run(run, 20)
    (run / "config.yaml").write_text(
        yaml.safe_dump({"train": {"steps": 20}, HOSTILE: {"x": HOSTILE}, "list": [HOSTILE]})
    )
    samples: list[Any] = [
        {"step": HOSTILE, "prompt": HOSTILE, "text": HOSTILE}, {"step": 2}, ["no object"],
        {"prompt": None, "text": {"a": HOSTILE}},
    ]  # fmt: skip
    (run / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    with (run / "events.jsonl").open("a") as file:
        for event in (
            {"event": "start", "time": HOSTILE, "layout": HOSTILE, "hardware": {HOSTILE: HOSTILE}},
            {"event": "resume", "step": HOSTILE, "time": 1e300},
            {"event": HOSTILE}, {"event": ["x"]}, {"event": "checkpoint"},
        ):  # fmt: skip
            file.write(json.dumps(event) + "\n")
    page = check(write_report(run))
    assert page.count("img") == 0 and page.count("b") == 3  # a sample's prompt is bold
    assert page.text().count("onerror=alert(2)") >= 8  # shown as the text it is
    assert "{{ 7*7 }}" in page.text()
    assert '<b>run & "more"\'' in page.text()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, r"holds no metrics\.jsonl; give the folder of a training run"),
        ("", r"metrics\.jsonl holds no step yet; wait for the first one"),
        ('{"step": 1', "holds no step yet"),
        ('{"step": 1}\n{oh\n{"step": 3}\n', r"metrics\.jsonl line 2 is not a JSON object"),
    ],
)
def test_folders_without_records(tmp_path: Path, content: str | None, wanted: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=wanted):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(DataError, match=r"cannot write .*report\.html"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_labels_of_a_chart_never_become_markup() -> None:
    points = np.array([[1.0, 2.0], [2.0, 3.0]])
    drawn = draw(Chart(HOSTILE, "number", [Line(HOSTILE, HOSTILE, points)]), (1, 2), Marks())
    svg = ElementTree.fromstring(drawn.svg)
    assert HOSTILE in svg.attrib["aria-label"]
    assert {element.tag for element in svg.iter()} == {"svg", "path", "circle", "text"}


def test_a_chart_over_something_else_than_steps() -> None:
    points = np.array([[0.02, 0.5], [2.0, 1.0]])
    across = Across("within", "seconds", may_log=True, limits=(0.2, 4.0))
    chart = Chart("Time", "share", [Line("e2e", "raw", points, joined=False)], across=across)
    drawn = draw(chart, (0, 1), Marks())
    assert drawn.across == "within"
    assert [p[2:] for p in drawn.lines[0]["points"]] == [["20.0 ms", "50.0%"], ["2.00 s", "100.0%"]]
    paths = [e.attrib.get("class", "") for e in ElementTree.fromstring(drawn.svg).iter()]
    assert paths.count("limit") == 2 and "line raw" not in paths and paths.count("dot raw") == 2
    assert "within (log)" in drawn.svg and ">step<" not in drawn.svg
    assert "50.0% at within 20.0 ms" in drawn.svg


@settings(deadline=None, derandomize=True, max_examples=60)
@given(arrays(np.float64, st.integers(1, 900), elements=st.floats(-1e6, 1e6)), st.integers(1, 40))
def test_downsampling_loses_no_spike(values: np.ndarray, buckets: int) -> None:
    points = np.column_stack([np.arange(1.0, len(values) + 1), values])
    kept = downsample(points, buckets)
    assert len(kept) <= max(4 * buckets, 1)
    assert (np.diff(kept[:, 0]) > 0).all()
    assert {tuple(p) for p in kept} <= {tuple(p) for p in points}
    assert (kept[0] == points[0]).all() and (kept[-1] == points[-1]).all()
    assert kept[:, 1].min() == values.min() and kept[:, 1].max() == values.max()


def test_the_mean_is_centred_and_ends_inside() -> None:
    points = np.column_stack([np.arange(1.0, 401), np.arange(1.0, 401) * 2])
    window = smoothing_window(400)
    assert window == 11 and smoothing_window(159) == 1 and smoothing_window(160) == 5
    found = smooth(points, window)
    assert np.allclose(found[:, 1], 2 * found[:, 0])  # a straight line stays, to its ends
    assert found[0, 0] == 2 and found[-1, 0] == 399
    noisy = points + np.random.default_rng(0).normal(0, 1, points.shape) * [0, 1]
    expected = [noisy[i - 5 : i + 6, 1].mean() for i in range(5, 395)]
    assert np.allclose(smooth(noisy, window)[4:-4, 1], expected)


def test_a_curve_takes_finite_numbers_alone() -> None:
    rows = [{"step": 1, "a": 1}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": True},
            {"step": 5, "a": "x"}, {"step": 6, "a": float("inf")}, {"step": 7, "a": 0.5}]  # fmt: skip
    assert curve(rows, "a").tolist() == [[1, 1], [7, 0.5]]
    assert curve([], "a").shape == (0, 2)
