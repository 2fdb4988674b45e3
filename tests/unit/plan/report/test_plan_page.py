"""The page in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.plan.report.page import page
from fivefold.plan.report.timeline import MOST_ACTIONS, drawn, timeline
from fivefold.plan.report.topology import axes, place
from fivefold.plan.search.answer import Answer, Asked, answer
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import judge
from fivefold.plan.search.guess import parse_guess
from fivefold.plan.search.valid import stages_of
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
EVIL = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def found() -> Answer:
    asked = job("llama-3.1-8b", "4x8xH100", 8192, 256, tokens=1e12)
    # Links between servers so slow, and memory so small, that a pipeline is worth it.
    slow = replace(asked.cluster.between, bandwidth=asked.cluster.between.bandwidth / 40)
    device = replace(asked.cluster.device, memory=30 * 2**30)
    cluster = replace(asked.cluster, name=EVIL, between=slow, device=device)
    asked = replace(asked, cluster=cluster)
    return answer(asked, estimators(), Asked(parse_guess("tp=8,pp=2,dp=2,schedule=1f1b")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def opened(
    browser: Browser, found: Answer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(page(found), encoding="utf-8")
    shown = browser.new_page(viewport={"width": 1200, "height": 800})
    wrong: list[str] = []
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    shown.on("request", lambda r: wrong.append(r.url) if not r.url.startswith("file:") else None)
    shown.goto(path.as_uri())
    yield shown
    shown.close()
    assert wrong == []


def test_all_pictures_are_there_and_nothing_runs_over(opened: Page, found: Answer) -> None:
    for name in ("memory", "waterfall", "pipeline", "topology"):
        box = opened.locator(f"#{name} svg").bounding_box()
        assert box is not None and box["width"] > 200 and box["height"] > 60, name
    sizes = {each.job.devices for each in found.front}
    assert opened.locator(".pareto").count() == min(2, len(sizes))
    ranks = opened.locator("#memory svg text", has_text="stage").count()
    assert ranks == found.winner.strategy.layout.pp
    names = [what for what, _ in found.winner.time.pieces]
    shown = [each.text_content() for each in opened.locator("#waterfall text.y").all()]
    assert shown == [*names, "step"]
    wide = opened.evaluate("document.documentElement.scrollWidth")
    assert wide <= 1200, "the page scrolls sideways"


def test_what_a_user_named_stays_text(opened: Page) -> None:
    assert "fivefold plan" in opened.title() and "broken" not in opened.title().split(" on ")[0]
    assert opened.locator("h1 img").count() == 0
    assert EVIL in opened.locator("h1").inner_text()


def test_a_pointer_over_the_front_is_told_values(opened: Page) -> None:
    plot = opened.locator(".pareto svg").first
    plot.hover(position={"x": 300, "y": 100})
    tip = opened.locator(".pareto .tip").first
    assert "GiB" in tip.inner_text() and " s" in tip.inner_text()


def test_a_narrow_screen_scrolls_inside_its_parts(
    browser: Browser, found: Answer, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(page(found), encoding="utf-8")
    narrow = browser.new_page(viewport={"width": 420, "height": 800}, color_scheme="dark")
    narrow.goto(path.as_uri())
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 420
    narrow.close()


def test_ranks_are_where_the_layout_puts_them() -> None:
    asked = job("llama-3.1-70b", "8x8xH100", 4096, 512)
    layout = parse_guess("tp=4,cp=2,pp=4,dp=2,zero=1").layout
    listed = {
        axis.name: axis for axis in axes(judge(asked, Strategy(layout, 1, "full"), estimators()))
    }
    assert listed["tp"].members == (0, 1, 2, 3) and not listed["tp"].group.crosses
    assert listed["cp"].members == (0, 4) and not listed["cp"].group.crosses
    assert listed["dp"].members == (0, 8) and listed["dp"].group.crosses
    assert listed["pp"].members == (0, 16, 32, 48)
    assert place(layout, 45) == {"tp": 1, "cp": 1, "dp_shard": 1, "dp_replicate": 0, "pp": 2}


def test_a_long_step_is_drawn_in_part() -> None:
    asked = job("llama-3.1-70b", "8x8xH100", 4096, 8192)
    layout = parse_guess("tp=8,pp=8,zero=1,schedule=interleaved,virtual=2").layout
    found = judge(asked, Strategy(layout, 1, "full"), estimators())
    line = timeline(found)
    assert line is not None
    assert line.schedule.microbatches == drawn(found) < found.time.microbatches
    assert len(line.spans) * 3 / 2 <= MOST_ACTIONS + 3 * stages_of(layout)
    assert (
        timeline(judge(asked, Strategy(parse_guess("tp=8,dp=8").layout, 1, "full"), estimators()))
        is None
    )
