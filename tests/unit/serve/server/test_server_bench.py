"""`fivefold bench serve` against the server that users start."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.engines.serve.load.session import Session, bench
from fivefold.engines.serve.load.settings import LoadSettings
from tests.unit.serve.server.real_server import RealServer

VOCABULARY = 400


def load(server: RealServer, **given: object) -> Session:
    chosen: dict[str, object] = {"vocabulary": VOCABULARY, "requests": 6, "output_tokens": 5}
    return bench(LoadSettings(server.url, **(chosen | given)))  # type: ignore[arg-type]


def test_every_token_is_counted_by_both(server: RealServer) -> None:
    before = server.engine()
    session = load(server, workload="fixed", input_tokens=40, concurrency=(3,), warmup=0)
    (summary,) = session.summaries
    assert (summary.answered, summary.failures) == (6, {})
    assert (summary.input_tokens, summary.output_tokens) == (240, 30)
    assert summary.counted_by == {"usage": 6} and summary.short_answers == 0
    for outcome in session.runs[0].outcomes:
        assert outcome.ttft is not None and outcome.e2e is not None
        assert 0 < outcome.ttft <= outcome.e2e and outcome.finish_reason == "length"
    after = server.wait_idle()
    assert after["requests_total"] - before["requests_total"] == 7  # with the one that asks first


def test_shared_prefixes_are_found_in_the_cache(server: RealServer) -> None:
    session = load(server, workload="fixed", input_tokens=100, shared_prefix=64, warmup=0)
    cached = [outcome.cached_tokens for outcome in session.runs[0].outcomes]
    assert cached[0] == 0 and cached[1:] == [64] * 5
    assert session.summaries[0].cached_tokens == 320
    own = load(server, workload="fixed", input_tokens=100)
    assert own.summaries[0].cached_tokens == 0


def test_a_trace_with_its_own_times(server: RealServer, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 30 * i, "input_length": 1200, "output_length": 100, "hash_ids": [7, i, i + 50]}
        for i in range(1, 9)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = load(server, workload="mooncake", trace=path, length_scale=0.0625, requests=None)
    outcomes = session.runs[0].outcomes
    assert [o.prompt_tokens for o in outcomes] == [75] * 8
    assert [o.completion_tokens for o in outcomes] == [6] * 8
    assert sum(o.cached_tokens == 32 for o in outcomes) >= 4  # others came while it was computed


def test_chat_from_the_command_line(server: RealServer) -> None:
    result = CliRunner().invoke(
        app, ["bench", "serve", "--url", server.url, "--endpoint", "chat", "--input-tokens", "60",
              "--output-tokens", "4", "--requests", "3", "--rate", "50", "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["answered"] == 3 and run["short_answers"] == 0
    assert 6 <= run["output_tokens"] <= 18
    assert 100 < run["input_tokens"] < 260
