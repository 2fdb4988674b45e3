"""The report: one file that fetches nothing; what a server says never becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from load_cases import answered, failed, run_of
from rich.console import Console

from fivefold.engines.serve.load.curves import shares, token_rate
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.measures import summarize
from fivefold.engines.serve.load.report import render, write_report
from fivefold.engines.serve.load.results import save_results
from fivefold.engines.serve.load.run import ClosedLoop, Run
from fivefold.engines.serve.load.table import print_summaries

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"
SLO = {"ttft": 0.6, "tpot": 0.2}


def some_run(count: int = 30, users: int = 2) -> Run:
    draw = np.random.default_rng(users)
    outcomes = [
        answered(i / 5, float(draw.uniform(0.01, 3)), tuple(draw.uniform(0, 0.3, 6).tolist()),
                 prompt_tokens=int(draw.integers(8, 900)), index=i)
        for i in range(count)
    ]  # fmt: skip
    outcomes.append(replace(failed(1.0, "status 500"), detail=HOSTILE))
    return replace(run_of(*outcomes), load=ClosedLoop(users))


def page(*runs: Run, about: dict[str, object] | None = None) -> str:
    chosen = about or {"model": "tiny"}
    return render(runs, [summarize(run, SLO) for run in runs], chosen)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("loads", [(1,), (1, 2, 4)])
def test_one_file_of_charts(loads: tuple[int, ...]) -> None:
    html = page(*(some_run(users=users) for users in loads))
    tags = Tags(html).tags
    assert not [t for t, _ in tags if t in {"link", "img", "iframe", "object", "embed", "base"}]
    assert not [a for _, a in tags if {"src", "href"} & a.keys()]
    assert not [name for _, a in tags for name in a if name.startswith("on")]
    assert sum(tag == "script" for tag, _ in tags) == 2
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in html
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)[0])
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawn) == len(data) == 8 * len(loads) + (5 if len(loads) > 1 else 0)
    assert [int(a["data-chart"] or -1) for t, a in tags if t == "figure"] != []
    for svg in drawn:
        ElementTree.fromstring(svg)
        assert "nan" not in svg
    for chart in data:
        for line in chart["lines"]:
            for x, y, where, value in line["points"]:
                assert 0 <= x <= 600 and 0 <= y <= 260 and where and value
    assert "within the SLO" in html or len(loads) == 1


def test_what_others_say_is_shown_as_text() -> None:
    html = page(some_run(), about={"model": HOSTILE, "address": HOSTILE})
    assert "<img" not in html and "alert(1)</script>" not in html
    assert html.count("alert(2)") == 5 and "{{ 7*7 }}" in html


def test_runs_without_an_answer_or_of_one_piece() -> None:
    assert "0 of 1" in page(run_of(failed()))
    assert "1 of 1" in page(run_of(answered(0.0, 0.1, ())))
    assert "0 of 0" in page(run_of())


def test_shares_are_those_at_most_as_large() -> None:
    assert shares([3.0, 1.0, 2.0, 2.0]).tolist() == [[1, 0.25], [2, 0.5], [2, 0.75], [3, 1.0]]


def test_tokens_over_time_add_up() -> None:
    outcomes = [answered(i * 0.3, 0.2, (0.1, 0.4), completion_tokens=6) for i in range(9)]
    curve = token_rate(outcomes, 3.3)
    width = curve[1, 0] - curve[0, 0]
    assert curve[:, 1].sum() * width == pytest.approx(54)
    assert token_rate([], 1.0).shape == (0, 2)


def test_files_are_written_or_refused_in_one_line(tmp_path: Path) -> None:
    run = some_run(3)
    write_report(tmp_path / "load.html", [run], [summarize(run, {})], {"model": "tiny"})
    assert (tmp_path / "load.html").read_text().startswith("<!DOCTYPE html>")
    save_results(tmp_path / "all.jsonl", [run, run])
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and rows[0]["ttft"] == pytest.approx(run.outcomes[0].ttft)
    assert rows[3]["failure"] == "status 500" and rows[3]["ttft"] is None
    assert {"load", "index", "scheduled", "sent", "gaps", "tpot", "e2e", "lag"} <= rows[0].keys()
    for write in (
        lambda: write_report(tmp_path, [run], [summarize(run, {})], {"model": "tiny"}),
        lambda: save_results(tmp_path, [run]),
    ):
        with pytest.raises(LoadError, match=r"cannot write .*: Is a directory"):
            write()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    runs = [some_run(users=2), some_run(users=16)]
    print_summaries([summarize(run, SLO) for run in runs], console)
    text = console.export_text()
    assert "…" not in text and "2 at once" in text and "16 at once" in text
    assert all(f"p{percent}" in text for percent in (50, 90, 95, 99))
    assert "failed: 1 x status 500" in text and "within" in text
