"""`fivefold bench serve`: tables, JSON, files, one-line errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import Script, ScriptedServer
from typer.testing import CliRunner, Result

from fivefold.cli.main import app
from fivefold.engines.serve.load.errors import LoadError


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: Script(first=0.01, between=0.001)) as running:
        yield running


def run(*arguments: str) -> Result:
    small = ["--input-tokens", "16", "--output-tokens", "3", "--requests", "3", "--warmup", "0"]
    return CliRunner().invoke(app, ["bench", "serve", *small, *arguments])


def test_a_table_for_people(server: ScriptedServer) -> None:
    result = run("--url", server.url, "--concurrency", "2", "--slo", "ttft=30s")
    assert result.exit_code == 0, result.output
    for words in ("tiny-one at http", "first token (TTFT)", "2 at once", "3/3", "100.0%", "p99"):
        assert words in result.output


def test_json_and_files(server: ScriptedServer, tmp_path: Path) -> None:
    html, results = tmp_path / "load.html", tmp_path / "all.jsonl"
    found = run("--url", server.url, "--rate", "50", "--rate", "100", "--json", "--seed", "4",
                "--html", str(html), "--save-results", str(results))  # fmt: skip
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["about"]["model"] == "tiny-one" and record["about"]["seed"] == 4
    assert [r["load"] for r in record["runs"]] == ["50/s Poisson", "100/s Poisson"]
    assert record["runs"][0]["latencies"]["ttft"]["percentiles"]["99"] > 0
    assert record["runs"][0]["answered"] == 3 and record["runs"][0]["slo"] == {}
    assert "<svg" in html.read_text() and len(results.read_text().splitlines()) == 6


def test_a_run_without_an_answer_fails(server: ScriptedServer) -> None:
    with ScriptedServer(lambda b: Script(status=429) if b["max_tokens"] > 1 else Script()) as busy:
        result = run("--url", busy.url)
    assert result.exit_code == 1 and "failed: 3 x status 429: no" in result.output


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "fivefold bench serve --url http://127.0.0.1:8000 --concurrency 16" in result.output
    assert "--workload mooncake" in result.output and "--slo" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "randon"], "no workload 'randon'; did you mean 'random'?"),
        (["--workload", "azure"], "--workload azure needs --trace FILE"),
        (["--workload", "file"], "--workload file needs --prompts FILE"),
        (["--trace", "x.csv"], "--workload random does not read --trace; give --workload azure"),
        (["--workload", "azure", "--trace", "x.csv"], "cannot read x.csv: No such file"),
        (["--workload", "azure", "--trace", "x", "--shared-prefix", "3"], "has no --shared-prefix"),
        (["--rate", "1", "--concurrency", "2"], "are two kinds of load"),
        (["--rate", "0"], "a rate of 0.0 requests a second"),
        (["--concurrency", "0"], "--concurrency is below 1"),
        (["--slo", "ttft=5"], "the SLO's ttft=5 is no time"),
        (["--spread", "1.5"], "a spread of 1.5"),
        (["--input-tokens", "0"], "--input-tokens is 0"),
        (["--duration", "-1"], "--duration is -1.0"),
        (["--extra", "{oh"], "--extra is no JSON object: '{oh'"),
        (["--extra", "[1]"], "--extra is no JSON object"),
        (["--endpoint", "chat", "--prompts-as", "ids"], "chat takes no token ids"),
        (["--text", "x"], "--text makes texts, not token ids; add --prompts-as text"),
        (["--prompts-as", "text", "--text", "x"], "cannot read x: No such file"),
        (["--html", "no/such/folder.html"], "cannot write --html no/such/folder.html"),
        (["--save-results", "/"], "cannot write --save-results /"),
        (["--model", "tiny-tow"], "did you mean 'tiny-two'?"),
    ],
)
def test_one_line_errors(server: ScriptedServer, arguments: list[str], words: str) -> None:
    result = run("--url", server.url, *arguments)
    assert isinstance(result.exception, LoadError), result.output
    assert words in str(result.exception) and "\n" not in str(result.exception)
