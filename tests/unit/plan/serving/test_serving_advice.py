"""The search for engines, its bounds, and `fivefold plan serve`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fivefold.cli.plan_serve import plan_serve
from fivefold.core.errors import FivefoldError, PlanError
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.serving.advise import most_rate, plan_serving
from fivefold.plan.serving.bounds import bounds, check_possible
from fivefold.plan.serving.curve import best_within, curve, point
from fivefold.plan.serving.explain import explain
from fivefold.plan.serving.options import engines
from fivefold.plan.serving.page import page
from fivefold.plan.serving.question import Question
from fivefold.plan.serving.report import answer
from fivefold.plan.serving.simulate import simulate
from fivefold.plan.serving.software import VLLM, software
from fivefold.plan.serving.strategy import ServingStrategy, Split
from fivefold.plan.serving.traffic import steady

LLAMA, BIG = shape("llama-3.1-8b"), shape("llama-3.1-70b")
H100, NODES = cluster("8xH100"), cluster("8x8xH100")
LIKE = ServingStrategy(system=VLLM)
SLO = {"ttft": 0.5, "tpot": 0.05}

app = typer.Typer()
app.command()(plan_serve)


def call(*words: str) -> Any:
    """The JSON that the command prints."""
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refused(*words: str) -> FivefoldError:
    with pytest.raises(FivefoldError) as caught:
        CliRunner().invoke(app, [*words], catch_exceptions=False)
    return caught.value


def test_engines_are_those_that_hold_the_model() -> None:
    ways = [each.layout.tp for each in engines(BIG, NODES, LIKE)]
    assert ways == [4, 8]
    narrow = [each.layout.tp for each in engines(BIG, NODES, replace(LIKE, weights="nvfp4"))]
    assert narrow == [1, 2, 4, 8]
    deep = engines(shape("llama-3.1-405b"), NODES, LIKE)
    assert all(each.layout.tp == 8 and each.layout.pp >= 2 for each in deep)
    apart = [str(each.layout) for each in engines(shape("mixtral-8x7b"), H100, LIKE)]
    assert "tp=2,ep=2" in apart and any("dp_shard=4,ep=4" in each for each in apart)


def test_70b_at_20_requests_a_second() -> None:
    """The question that the issue asks: 2k in, 300 out, TTFT under 500 ms."""
    traffic = steady(20.0, 2000, 300, requests=120)
    found = plan_serving(BIG, NODES, traffic, SLO, LIKE, most_options=1)
    best = found.best
    assert best.fits and best.share >= 0.95 and best.devices <= 64
    ttft, tpot = (best.summary.latencies[name] for name in ("ttft", "tpot"))
    assert ttft is not None and ttft.percentiles[90] <= 0.5
    assert tpot is not None and tpot.percentiles[90] <= 0.05
    assert [each.devices for each in found.options] == sorted(o.devices for o in found.options)
    assert {type(each.deployed) for each in found.options} == {ServingStrategy, Split}
    # Reading prompts alone takes 20 x 2000 x 2 x 70.6e9 FLOP/s, of 653 TFLOP/s a device.
    assert best.devices > 20 * 2000 * 2 * 70e9 / 653e12


def test_the_rate_that_an_engine_takes_is_within_its_limits() -> None:
    traffic = steady(5.0, 1000, 100, requests=200)
    most = most_rate(LLAMA, LIKE, H100, traffic, SLO, 0.95)
    roof = best_within(LLAMA, LIKE, H100, 1000, 100, 0.05)
    assert roof is not None and 1.0 < most <= 1.1 * roof.requests_per_second
    slow = simulate(LLAMA, LIKE, H100, steady(most * 0.8, 1000, 100, requests=150))
    assert (slow.summary(SLO).goodput_share or 0) >= 0.95
    fast = simulate(LLAMA, LIKE, H100, steady(most * 2, 1000, 100, requests=300))
    assert (fast.summary(SLO).goodput_share or 0) < 0.95


def test_impossible_traffic_says_the_bound() -> None:
    candidates = engines(BIG, NODES, LIKE)
    traffic = steady(1.0, 2000, 300, requests=10)
    found = bounds(BIG, candidates, NODES, 2000, 300)
    with pytest.raises(PlanError, match=r"TTFT of 20 ms is impossible: reading 2000 tokens takes"):
        check_possible(BIG, candidates, NODES, traffic, {"ttft": 0.02})
    with pytest.raises(PlanError, match=f"takes {found.tpot * 1e3:.1f} ms at least on H100"):
        check_possible(BIG, candidates, NODES, traffic, {"tpot": 0.002})
    with pytest.raises(PlanError, match=r"answers within 0\.10 s are impossible"):
        check_possible(BIG, candidates, NODES, traffic, {"e2e": 0.1})
    with pytest.raises(PlanError, match="the longest request has 9000000 tokens"):
        check_possible(BIG, candidates, NODES, steady(1.0, 8_000_000, 1_000_000, requests=1), {})


def test_a_cluster_that_is_too_small_says_how_much_it_takes() -> None:
    traffic = steady(500.0, 2000, 300, requests=200)
    with pytest.raises(PlanError, match=r"500 requests/s need \d+ H100") as caught:
        plan_serving(LLAMA, H100, traffic, SLO, LIKE, most_options=1)
    assert "requests/s at most" in caught.value.mend


def test_curves_grow_with_the_batch() -> None:
    points = curve(LLAMA, LIKE, H100, 1000, 200)
    assert [p.batch for p in points[:4]] == [1, 2, 4, 8] and points[-1].batch <= 256
    for name in ("step", "tpot", "tokens_per_second", "requests_per_second"):
        values = [getattr(p, name) for p in points]
        assert values == sorted(values)
    assert best_within(LLAMA, LIKE, H100, 1000, 200, 1e-4) is None
    limit = points[3].tpot * 1.001
    found = best_within(LLAMA, LIKE, H100, 1000, 200, limit)
    assert found is not None and found.batch >= 8 and found.tpot <= limit
    above = point(LLAMA, LIKE, H100, found.batch + 1, 1000, 200)
    assert above.tpot > limit


def test_the_arithmetic_is_shown() -> None:
    text = "\n".join(explain(LLAMA, LIKE, H100, 16, 1000, 200))
    assert "2 x 8 kv heads x 128 dims x 2 bytes x 32 layers = 128.0 KiB" in text
    assert "reading all takes" in text and "in 1 step: " in text
    mixture = replace(LIKE, layout=LIKE.layout.model_copy(update={"tp": 8}), weights="fp8")
    text = "\n".join(explain(shape("deepseek-v3"), mixture, cluster("8xH200"), 16, 1000, 200))
    assert "16 tokens that choose 8 of 256 experts meet 102 of them: 40%" in text
    assert "(512 latent + 64 rotary) x 2 bytes x 61 layers" in text


LOOK = ["--model", "llama-3.1-8b", "--cluster", "8xH100", "--layout", "tp=2", "--system", "vllm"]


def test_command_looks_at_a_layout() -> None:
    found = call(*LOOK, "--concurrency", "8", "--requests", "24", "--slo", "ttft=1s")
    assert found["layout"] == "tp=2" and found["devices_an_engine"] == 2
    assert found["simulation"]["summary"]["answered"] == 24
    assert found["simulation"]["summary"]["goodput_share"] == 1.0
    assert found["step"]["total"] == pytest.approx(
        sum(v for k, v in found["step"].items() if k not in ("total", "batch"))
    )
    apart = call(*LOOK, "--concurrency", "8", "--requests", "24", "--split", "1+2")
    assert apart["simulation"]["devices"] == 6
    plain = call(*LOOK)
    assert plain["simulation"] is None and plain["curve"]
    drafted = call(*LOOK, "--speculate", "0.8x4@0")
    assert drafted["curve"][0]["tpot"] < 0.5 * plain["curve"][0]["tpot"]


def test_command_searches_and_prints() -> None:
    words = [
        "--model", "llama-3.1-8b", "--cluster", "4xH100", "--rate", "4", "--requests", "60",
        "--input-tokens", "500", "--output-tokens", "50", "--slo", "ttft=500ms,tpot=50ms",
        "--flags", "vllm",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*words, "--explain"], catch_exceptions=False)
    assert result.exit_code == 0
    for text in ("fewest devices first", "without queues", "simulated:", "KiB", "off by"):
        assert text in result.output
    assert "vllm serve llama-3.1-8b" in result.output
    assert "--tensor-parallel-size 1" in result.output


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--rate", "1", "--concurrency", "2"], "three kinds of load"),
        (["--trace", "azure"], "says the kind"),
        (["--share", "2"], "--share is 2"),
        (["--speculate", "fast"], "no RATE x TOKENS"),
        (["--split", "many"], "no PREFILL"),
        (["--system", "vlm"], "unknown serving system"),
        (["--weights", "fp9"], "fp9"),
        (["--layout", "tp=16"], "needs 16 devices"),
        (["--slo", "ttft=fast", "--rate", "1"], "no time"),
        (["--html", "/nowhere/at/all.html"], "cannot write --html"),
        (["--trace", "azure", "--trace-file", "/nowhere.csv"], "cannot read"),
        (["--flags", "tgi"], "unknown system 'tgi'"),
    ],
)
def test_command_refuses(words: list[str], match: str) -> None:
    assert match in str(refused(*LOOK, *words))


def test_names_of_systems() -> None:
    assert software("sglang").order == "prompts-first"
    with pytest.raises(PlanError, match="did you mean 'vllm'"):
        software("vlm")


def test_page_in_a_browser(tmp_path: Path) -> None:
    """Self-contained, no errors, and each picture has a size."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    question = Question(
        rate=4.0, input_tokens=500, output_tokens=50, requests=60, slo="ttft=500ms", system="vllm"
    )
    text = page(answer(LLAMA, cluster("2xH100"), question))
    assert "src=" not in text and "<link" not in text and "@import" not in text
    file = tmp_path / "serve.html"
    file.write_text(text, encoding="utf-8")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        opened = chromium.new_page(viewport={"width": 1200, "height": 1000})
        wrong: list[str] = []
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        opened.goto(file.as_uri())
        assert opened.locator("#options tr").count() >= 2
        for each in opened.locator("svg").all():
            box = each.bounding_box()
            assert box is not None and box["width"] > 100 and box["height"] > 50
        assert opened.locator("svg.bars").count() == 2
        wide = opened.evaluate("document.documentElement.scrollWidth")
        assert wide <= 1200
        chromium.close()
    assert wrong == []
