"""Whole sessions against a scripted server: delays that are known, failures of every kind.

Lower bounds on times are the server's own sleeps; upper bounds are loose, for busy machines.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Script, ScriptedServer

from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.session import Session, bench
from fivefold.engines.serve.load.settings import LoadSettings
from fivefold.engines.serve.load.traces import read_azure, read_mooncake

EARLY = 0.002  # a sleep may end that much before its time by the clock
LOOSE = 20.0


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def load(server: ScriptedServer, **given: Any) -> Session:
    chosen: dict[str, Any] = {
        "workload": "fixed", "input_tokens": 12, "output_tokens": 3, "requests": 4, "warmup": 0,
        "seed": 1,
    }  # fmt: skip
    return bench(LoadSettings(server.url, **(chosen | given)))


def test_known_delays_are_measured(server: ScriptedServer) -> None:
    server.script = lambda body: Script(first=0.1, between=0.04)
    session = load(server, output_tokens=4, concurrency=(2,), slo=f"ttft={LOOSE:g}s,tpot=50us")
    for outcome in session.runs[0].outcomes:
        assert outcome.ok and outcome.ttft and outcome.tpot and outcome.e2e
        assert 0.1 - EARLY <= outcome.ttft < LOOSE
        assert 0.22 - 4 * EARLY <= outcome.e2e < LOOSE
        assert outcome.tpot == pytest.approx((outcome.e2e - outcome.ttft) / 3)
        assert len(outcome.gaps) == 3 and sum(outcome.gaps) == pytest.approx(outcome.tpot * 3)
        assert (outcome.prompt_tokens, outcome.completion_tokens) == (12, 4)
    (summary,) = session.summaries
    assert (summary.requests, summary.answered, summary.most_at_once) == (4, 4, 2)
    assert (summary.output_tokens, summary.input_tokens) == (16, 48)
    assert summary.goodput == 0  # no token in 50 microseconds
    assert summary.output_throughput == pytest.approx(16 / summary.seconds)
    assert 0.44 - 8 * EARLY <= summary.seconds < LOOSE


def test_what_is_asked(server: ScriptedServer) -> None:
    session = load(server, concurrency=(1,), extra={"top_k": 5}, temperature=0.5, api_key="k")
    for body in server.bodies:
        assert body["model"] == session.about["model"] == "tiny-one"
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert (body["ignore_eos"], body["temperature"], body["top_k"]) == (True, 0.5, 5)
    probe, *asked = server.bodies
    assert probe["max_tokens"] == 1 and len(asked) == 4
    assert {len(body["prompt"]) for body in asked} == {12}
    assert len({tuple(body["prompt"]) for body in asked}) == 4
    assert set(server.keys) == {"Bearer k"}
    server.bodies.clear()
    load(server, ignore_eos=False, model="tiny-two")
    assert all("ignore_eos" not in b and b["model"] == "tiny-two" for b in server.bodies)


def test_warm_up_does_not_count_and_shares_nothing(server: ScriptedServer) -> None:
    session = load(server, warmup=3, concurrency=(2, 3), requests=5)
    assert len(server.bodies) == 1 + 2 * (3 + 5)
    assert [summary.requests for summary in session.summaries] == [5, 5]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    assert [summary.load for summary in session.summaries] == ["2 at once", "3 at once"]


def test_seeds_repeat_or_differ(server: ScriptedServer) -> None:
    def prompts(**given: Any) -> list[Any]:
        server.bodies.clear()
        settings = LoadSettings(server.url, workload="fixed", requests=2, warmup=0, **given)
        bench(settings)
        return [body["prompt"] for body in server.bodies[1:]]

    assert prompts(seed=3) == prompts(seed=3)
    assert prompts() != prompts()


def test_latency_counts_from_when_a_request_was_due(server: ScriptedServer) -> None:
    """Arrivals do not wait for a slow server: all are out together, each timed from its own."""
    server.script = lambda body: Script(first=0.5 if body["max_tokens"] > 1 else 0)
    session = load(server, rates=(50.0,), arrivals="fixed", requests=6)
    outcomes = session.runs[0].outcomes
    assert [o.scheduled for o in outcomes] == pytest.approx([i / 50 for i in range(6)])
    assert all(o.lag >= -EARLY and o.ttft is not None and o.ttft >= 0.5 - EARLY for o in outcomes)
    assert session.summaries[0].offered_rate == pytest.approx(50)
    assert session.summaries[0].most_at_once > 1
    assert session.summaries[0].load == "50/s even"


def test_a_busy_client_says_so(server: ScriptedServer) -> None:
    from fivefold.engines.serve.load.material import TokenIds

    class Slow(TokenIds):
        def prompt(self, parts: Any) -> list[int]:
            time.sleep(0.05)
            return super().prompt(parts)

    settings = LoadSettings(
        server.url, workload="fixed", input_tokens=8, output_tokens=2, requests=10, warmup=0,
        rates=(1000.0,),
    )  # fmt: skip
    slow = Slow(settings.vocabulary, settings.seed)
    object.__setattr__(settings, "material", lambda: slow)
    (summary,) = bench(settings).summaries
    assert summary.client_was_late
    assert summary.lag is not None and summary.lag.high > 0.3
    ttft = summary.latencies["ttft"]
    assert ttft is not None and ttft.high >= summary.lag.high  # the user waited for it


def test_no_more_are_out_than_there_are_users(server: ScriptedServer) -> None:
    out, most, lock = 0, 0, threading.Lock()

    def script(body: dict[str, Any]) -> Script:
        return Script(first=0.01)

    server.script = script
    answer = server._stream

    async def counted(*arguments: Any) -> None:
        nonlocal out, most
        with lock:
            out += 1
            most = max(most, out)
        try:
            await answer(*arguments)
        finally:
            out -= 1

    server._stream = counted  # type: ignore[method-assign]
    session = load(server, concurrency=(3,), requests=12)
    assert session.summaries[0].answered == 12
    assert most <= 3 and session.summaries[0].most_at_once <= 3


def test_failures_are_counted_by_kind(server: ScriptedServer) -> None:
    scripts = [
        Script(status=429, said="the queue is full"), Script(status=500, said="boom"),
        Script(then="error"), Script(then="cut"), Script(then="gone"), Script(then="garbage"),
        Script(then="hang"), Script(tokens=0), Script(content_type="application/json"), Script(),
    ]  # fmt: skip
    left = itertools.chain([Script()], scripts)
    server.script = lambda body: next(left)
    session = load(server, concurrency=(1,), requests=len(scripts), timeout=3.0)
    kinds = Counter(o.failure for o in session.runs[0].outcomes)
    assert kinds == {
        "status 429": 1, "status 500": 1, "error event": 1, "cut short": 1, "disconnected": 1,
        "bad stream": 2, "timeout": 1, "no tokens": 1, None: 1,
    }  # fmt: skip
    summary = session.summaries[0]
    assert summary.examples["status 429"] == "the queue is full"
    assert summary.examples["error event"] == "the engine died"
    assert summary.answered == 1 and sum(summary.failures.values()) == 9
    assert summary.output_tokens == 3  # those of the one answer


def test_a_server_that_dies_meanwhile() -> None:
    with ScriptedServer(lambda body: Script(first=0.05)) as server:
        threading.Timer(0.6, server.stop).start()
        session = load(server, concurrency=(1,), requests=200)
    summary = session.summaries[0]
    assert summary.requests == 200 and 0 < summary.answered < 200
    assert set(summary.failures) <= {"unreachable", "disconnected", "connection lost", "cut short"}
    assert summary.failures["unreachable"] > 0


def test_chat_prompts_have_as_many_tokens_as_wanted(server: ScriptedServer) -> None:
    session = load(server, endpoint="chat", input_tokens=157, requests=3)
    for outcome in session.runs[0].outcomes:
        assert outcome.prompt_tokens == 157  # 100 words of 1.5 tokens, and 7 for the template
        assert outcome.asked_input == 157 and outcome.completion_tokens == 3
    assert session.about["prompts"] == "common words, 1.50 tokens a word"


def test_text_prompts_where_no_ids_are_taken(server: ScriptedServer, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael. Some years ago, never mind how long precisely")
    session = load(server, prompts_as="text", text=book, input_tokens=30)
    assert all(o.prompt_tokens == 30 for o in session.runs[0].outcomes)
    assert "Ishmael." in server.bodies[-1]["prompt"]


def test_a_server_without_usage(server: ScriptedServer) -> None:
    server.script = lambda body: Script(usage=False)
    session = load(server, endpoint="chat", input_tokens=20)
    summary = session.summaries[0]
    assert summary.counted_by == {"pieces": 4} and summary.output_tokens == 12
    assert summary.input_tokens is None and summary.input_throughput is None
    assert len(server.bodies[-1]["messages"][0]["content"].split()) == 20


def test_usage_counts_more_than_pieces(server: ScriptedServer) -> None:
    server.script = lambda body: Script(tokens=2, tokens_a_piece=3, between=0.02, cached=5)
    session = load(server, output_tokens=6)
    summary = session.summaries[0]
    assert (summary.output_tokens, summary.short_answers, summary.cached_tokens) == (24, 0, 20)
    outcome = session.runs[0].outcomes[0]
    assert outcome.tpot == pytest.approx(outcome.gaps[0] / 5)


def test_texts_of_a_file_are_sent_as_they_are(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    session = load(server, workload="file", prompts=path, requests=3, warmup=2)
    asked = [body["prompt"] for body in server.bodies]
    assert asked[-3:] == ["one", "two", "one"] and asked.count("one") == 2
    assert session.runs[0].outcomes[0].asked_input is None


def test_a_mooncake_trace_shares_prompts_on_the_wire(
    server: ScriptedServer, shared_data: Path
) -> None:
    path = shared_data / "mooncake-trace" / "synthetic_trace.jsonl"
    session = load(
        server, workload="mooncake", trace=path, length_scale=0.01, max_prompt_tokens=30,
        max_output_tokens=2, speed=1000.0, requests=150,
    )  # fmt: skip
    assert session.summaries[0].answered == 150
    rows = [row for row in read_mooncake(path)[:150] if round(row.input_tokens * 0.01) >= 6]
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    expected = Counter(row.blocks[0] for row in rows)
    found = Counter(prompt[:6] for prompt in prompts if len(prompt) >= 6)
    assert sorted(found.values()) == sorted(expected.values()) and max(found.values()) > 1
    scheduled = [outcome.scheduled for outcome in session.runs[0].outcomes]
    assert scheduled == sorted(scheduled) and session.summaries[0].load.startswith("trace, 1000")
    assert str(session.about["workload"]).startswith("mooncake trace")


def test_an_azure_trace_at_another_rate(server: ScriptedServer, shared_data: Path) -> None:
    path = shared_data / "azure-llm-trace-2023" / "AzureLLMInferenceTrace_conv.csv"
    session = load(server, workload="azure", trace=path, max_output_tokens=4, requests=20,
                   concurrency=(5,))  # fmt: skip
    wanted = [row.input_tokens for row in read_azure(path)[:20]]
    assert [outcome.prompt_tokens for outcome in session.runs[0].outcomes] == wanted
    assert session.summaries[0].load == "5 at once"
    assert "20 of 20 cut to the limits" in str(session.about["workload"])


def test_a_duration_ends_the_sending(server: ScriptedServer) -> None:
    server.script = lambda body: Script(first=0.02)
    closed = load(server, concurrency=(2,), requests=None, duration=0.5).summaries[0]
    assert 2 <= closed.requests <= 60
    opened = load(server, rates=(40.0,), requests=None, duration=0.5).runs[0]
    assert all(o.scheduled <= 0.5 for o in opened.outcomes) and len(opened.outcomes) > 3


def test_a_server_that_lists_no_models(server: ScriptedServer) -> None:
    server.models = None
    with pytest.raises(LoadError, match="lists no model; name one with --model"):
        load(server)
    assert load(server, model="mine").about["model"] == "mine"


@pytest.mark.parametrize(
    ("script", "given", "wanted"),
    [
        (Script(), {"model": "tiny-tow"}, "serves no model 'tiny-tow'; did you mean 'tiny-two'?"),
        (Script(status=401, said="bad key"), {}, r"\(status 401\): bad key; give --api-key"),
        (Script(status=400, said="token 900 but the vocabulary has 512"), {}, "--vocabulary N"),
        (Script(status=400, said="unknown field ignore_eos"), {}, "give --no-ignore-eos"),
        (Script(status=422, said="prompt must be str"), {}, "try --prompts-as text"),
        (Script(status=404, said="not found"), {}, "try the other --endpoint"),
        (Script(status=500, said="boom"), {}, r"\(status 500\): boom; see the server's log"),
        (Script(then="error"), {}, r"\(error event\): the engine died"),
    ],
)
def test_what_the_first_request_tells(
    server: ScriptedServer, script: Script, given: dict[str, Any], wanted: str
) -> None:
    server.script = lambda body: script
    with pytest.raises(LoadError, match=wanted) as error:
        load(server, **given)
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there() -> None:
    with ScriptedServer() as server:
        url = server.url
    with pytest.raises(LoadError, match=r"cannot reach .*refused; is the server running there\?"):
        bench(LoadSettings(url))


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://", "http://x:y", ""])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(LoadError, match="is no address of a server; write --url http://HOST:PORT"):
        bench(LoadSettings(url))


def test_an_address_may_end_with_v1(server: ScriptedServer) -> None:
    settings = LoadSettings(server.url + "/v1/", requests=1, warmup=0)
    assert bench(settings).about["address"] == f"{server.url}/v1/completions"
    assert replace(settings, endpoint="chat").form == "text"
