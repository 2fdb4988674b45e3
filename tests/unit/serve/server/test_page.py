"""The built-in page in a real browser, against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fivefold.engines.serve.server.routes.page import HEADERS
from tests.unit.serve.server.real_server import RealServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, Route, expect  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
WAIT = 60_000
HTML = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser, server: RealServer) -> Iterator[Page]:
    """The page once it knows the engine; a script's error or a refused resource fails the test."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(WAIT)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda m: wrong.append(m.text) if "Security Policy" in m.text else None)
    opened.goto(server.url)
    expect(opened.locator("#status")).to_have_text("ready", timeout=WAIT)
    yield opened
    opened.close()
    assert wrong == []


def ask(page: Page, text: str, **settings: str) -> None:
    if not page.locator("#settings").evaluate("(details) => details.open"):
        page.click("summary")
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.fill("#text", text)
    page.press("#text", "Enter")


def stream_of(*contents: str, reason: str = "stop", reasoning: str = "") -> str:
    """Events as the server sends them."""
    deltas = [{"reasoning_content": reasoning}] if reasoning else []
    events = [{"choices": [{"delta": d}]} for d in [*deltas, *({"content": c} for c in contents)]]
    events.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    events.append({"choices": [], "usage": {"completion_tokens": len(contents)}})
    return "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"


def answer_with(page: Page, body: str, asked: list[dict[str, object]] | None = None) -> None:
    """Let chats be answered with this instead of the model's words."""

    def give(route: Route) -> None:
        if asked is not None:
            asked.append({**json.loads(route.request.post_data or ""), **route.request.headers})
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", give)


def test_every_file_is_there_and_none_comes_from_elsewhere(server: RealServer) -> None:
    from fivefold.engines.serve.server.routes.page import FOLDER

    for path in FOLDER.iterdir():
        answer = httpx.get(f"{server.url}/{path.name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "innerHTML" not in text
    assert httpx.get(server.url).text == Path(FOLDER / "index.html").read_text()


def test_a_chat_with_the_model(page: Page, server: RealServer) -> None:
    ask(page, "Once upon a time", temperature="0", most="24")
    expect(page.locator(".about")).to_contain_text("24 tokens", timeout=WAIT)
    expect(page.locator(".about")).to_contain_text("ended by the limit on tokens")
    said = {"messages": [{"role": "user", "content": "Once upon a time"}]}
    alone = server.ask("/v1/chat/completions", **said, temperature=0, max_tokens=24).json()
    content = alone["choices"][0]["message"]["content"]
    shown = page.locator(".message:not(.user) .said")
    assert shown.evaluate("(element) => element.textContent") == content.replace("`", "")
    assert page.locator(".user .said").text_content() == "Once upon a time"
    page.click("#clear")
    expect(page.locator("#welcome")).to_be_visible()


def test_stop_ends_the_answer_and_frees_the_engine(page: Page, server: RealServer) -> None:
    (engine,) = server.engine_processes()
    before = server.engine()["steps"]

    def suspend() -> None:
        server.wait(lambda state: state["running"] == 1 and state["steps"] > before + 20)
        engine.suspend()

    # Watched from before it is asked: a slow browser must not find the answer at its end.
    with ThreadPoolExecutor(1) as watcher:
        suspended = watcher.submit(suspend)
        ask(page, "Once", temperature="0", most="1900")
        suspended.result()
    try:
        expect(page.locator(".message:not(.user) .said")).not_to_be_empty(timeout=WAIT)
        page.click("#stop")
        expect(page.locator(".about")).to_have_text("stopped", timeout=WAIT)
    finally:
        engine.resume()
    expect(page.locator("#send")).to_be_visible()
    server.wait_idle()


def test_an_error_is_told_and_the_question_comes_back(page: Page) -> None:
    ask(page, "Hello", temperature="-1")
    expect(page.locator(".error")).to_contain_text("temperature")
    expect(page.locator("#text")).to_have_value("Hello")
    ask(page, "Hello", temperature="0", most="4")
    expect(page.locator(".about")).to_contain_text("4 tokens")


def test_an_error_in_the_stream(page: Page) -> None:
    error = {"error": {"message": "the engine stopped", "type": "server_error"}}
    body = (
        'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n' + f"data: {json.dumps(error)}\n\n"
    )
    answer_with(page, body)
    ask(page, "Hello")
    expect(page.locator(".error")).to_have_text("the engine stopped")
    expect(page.locator(".message:not(.user) .said")).to_have_text("Half")


def test_what_the_model_says_is_text_and_code_is_set_apart(page: Page) -> None:
    answer_with(page, stream_of(HTML, "\n```py\n<i>x</i>\n", "```\n", "and `y`.", reasoning=HTML))
    ask(page, HTML)
    expect(page.locator(".about")).to_contain_text("4 tokens")
    for place in (".user .said", ".reasoning div"):
        assert page.locator(place).text_content() == HTML
    said = page.locator(".message:not(.user) .said")
    assert said.text_content() == f"{HTML}<i>x</i>and y."
    assert [e.text_content() for e in said.locator("code").all()] == ["<i>x</i>", "y"]
    assert page.locator("#messages img, #messages b, #messages i").count() == 0
    assert page.title() == "tiny · fivefold"


def test_the_conversation_the_settings_and_the_key_are_sent(page: Page) -> None:
    asked: list[dict[str, object]] = []
    answer_with(page, stream_of("Yes."), asked)
    ask(page, "One", system="Be brief.", key="secret", temperature="0.5", most="9")
    expect(page.locator(".about")).to_have_count(1)
    ask(page, "Two")
    expect(page.locator(".about")).to_have_count(2)
    first, second = asked
    assert first["authorization"] == "Bearer secret"
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.5, 9, "tiny")
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two"},
    ]


def test_the_engine_is_shown_live(page: Page) -> None:
    state = {
        "running": 3, "waiting": 2, "blocks": 200, "blocks_owned": 50, "blocks_cached": 100,
        "block_size": 16, "tokens_asked": 1000, "tokens_hit": 250, "hit_rate": 0.25, "steps": 7,
        "preemptions": 1, "restarts": 0, "tokens_per_second": 1234.5, "requests_total": 42,
        "model": "shown", "context": 4096, "dtype": "bfloat16", "device": "cpu",
        "parameters": 134_515_008, "ready": True, "draining": False,
    }  # fmt: skip
    page.route("**/engine", lambda route: route.fulfill(json=state))
    expect(page.locator("#facts")).to_contain_text("shown · 134.5M parameters · bfloat16 · cpu")
    values = [value.text_content() for value in page.locator(".value").all()]
    assert values == ["1,235", "3 + 2", "25%", "25%"]
    assert "42" in page.locator("#counts").inner_text()
    assert page.locator(".line").first.get_attribute("d")
    page.route("**/engine", lambda route: route.fulfill(json={**state, "ready": False}))
    expect(page.locator("#status")).to_have_text("the engine is down")
    page.route("**/engine", lambda route: route.abort())
    expect(page.locator("#status")).to_have_text("the server does not answer")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1200, 800), (360, 640)])
def test_nothing_is_cut_off(page: Page, scheme: str, width: int, height: int) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": height})
    answer_with(page, stream_of("word " * 200 + "x" * 300))
    ask(page, "y" * 300)
    expect(page.locator(".about")).to_have_count(1)
    wide = "(e) => e.scrollWidth > e.clientWidth"
    for place in ("html", "#messages", "#facts"):
        assert not page.locator(place).evaluate(wide), place
    if width < 800:
        expect(page.locator("#engine")).to_be_hidden()
        page.click("nav >> text=Engine")
        expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#counts")).to_be_visible()
    assert not page.locator("#engine").evaluate(wide)
