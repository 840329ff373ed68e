"""The chat page in headless Chromium, on real servers."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from grout.errors import QueueFull
from server.settings import Settings
from tests.server.browser import CHROMIUM, Browser, Tab
from tests.server.fakes import FakeEngine, Live, live, wait_for
from tests.server.gate import Gate

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Live[FakeEngine]) -> Iterator[Tab]:
    with browser.open(f"{server.url}/") as tab:
        ready(tab)
        yield tab


def ready(tab: Tab) -> None:
    tab.until("document.querySelector('#model option') !== null")


def send(tab: Tab, text: str) -> None:
    tab.run("document.querySelector('#text').value = ''")
    tab.type("#text", text)
    tab.click("#send")


def wait_for_answer(tab: Tab, number: int = 1) -> None:
    tab.until(f"document.querySelectorAll('.assistant .rate').length === {number}")


def last(tab: Tab, selector: str) -> str:
    """The text of that part of the last answer."""
    return str(
        tab.run(f"[...document.querySelectorAll('.assistant {selector}')].at(-1).textContent")
    )


def test_it_needs_nothing_from_elsewhere(page: Tab, server: Live[FakeEngine]) -> None:
    send(page, "Hi")
    wait_for_answer(page)
    urls = [url for url, _ in page.requests]
    for path in ("/", "/static/chat.css", "/static/chat.js", "/v1/models", "/v1/chat/completions"):
        assert f"{server.url}{path}" in urls
    assert [url for url in urls if not url.startswith(f"{server.url}/")] == []
    assert page.complaints == []
    assert page.run("[...document.querySelectorAll('#model option')].map((o) => o.value)") == [
        "acme/tiny-1"
    ]


def test_an_answer_streams(page: Tab, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.reply = ["<think>", "let me ", "see\n", "</think>", "\n\n", "Hello ", "世界 ", "🙂\n2"]
    gate = Gate(engine, monkeypatch)
    send(page, "Hi 你好")
    wait_for(lambda: engine.running == 1)
    assert page.visible("#stop") and not page.visible("#send")
    assert page.text("article.user .text") == "Hi 你好"
    gate.open(2)
    page.until("document.querySelector('.assistant details p')?.textContent === 'let me '")
    assert page.text(".assistant summary") == "Thinking…"
    # Folded: there, and not shown.
    assert page.run("document.querySelector('.assistant details').open") is False
    assert not page.visible(".assistant details p")
    assert page.run("document.querySelector('.assistant .text')") is None
    gate.open(4)
    page.until("document.querySelector('.assistant .text')?.textContent === 'Hello '")
    assert page.text(".assistant summary") == "Thoughts"
    assert page.run("document.querySelector('.assistant .rate')") is None
    assert engine.running == 1
    gate.open(100)
    wait_for_answer(page)
    assert page.text(".assistant .text") == "Hello 世界 🙂\n2"
    assert page.text(".assistant details p") == "let me see"
    assert re.fullmatch(r"9 tokens, [0-9.]+ tok/s", last(page, ".rate"))
    page.click(".assistant summary")
    page.until("document.querySelector('.assistant details').open")
    assert page.visible(".assistant details p")
    assert page.visible("#send") and not page.visible("#stop")
    assert engine.chat_template is not None and engine.chat_template.kwargs == {}


def test_stop(page: Tab, engine: FakeEngine) -> None:
    engine.endless, engine.delay, engine.max_model_len = True, 0.1, 10**9
    send(page, "Go on")
    page.until("document.querySelector('.assistant .text')?.textContent.length > 20")
    assert engine.running == 1
    page.click("#stop")
    wait_for(lambda: engine.running == 0)
    assert (engine.aborted, engine.finished) == (1, 0)
    wait_for_answer(page)
    assert last(page, ".rate").endswith(", stopped")
    assert "tok/s" in last(page, ".rate")
    assert page.text("#status") == ""
    # What came until then is part of the conversation.
    shown = last(page, ".text")
    engine.endless, engine.reply = False, ["Again."]
    send(page, "More")
    wait_for_answer(page, 2)
    assert last(page, ".text") == "Again."
    assert engine.chat_template is not None
    assert engine.chat_template.seen[1] == {"role": "assistant", "content": shown}
    assert page.complaints == []


def test_a_conversation_sends_what_was_said(page: Tab, engine: FakeEngine) -> None:
    assert engine.chat_template is not None
    engine.reply = ["<think>secret</think>", "\n\nBlue <b>."]
    send(page, "First")
    wait_for_answer(page)
    engine.reply = ["Green."]
    page.click("#think")
    page.type("#text", "Second")
    page.press("Enter", shift=True)
    page.type("#text", "line")
    assert page.run("document.querySelector('#text').value") == "Second\nline"
    page.press("Enter")
    wait_for_answer(page, 2)
    assert engine.chat_template.seen == [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "Blue <b>."},
        {"role": "user", "content": "Second\nline"},
    ]
    assert engine.chat_template.kwargs == {"enable_thinking": False}
    page.click("#clear")
    assert page.run("document.querySelectorAll('#log *').length") == 0
    send(page, "Third")
    wait_for_answer(page)
    assert engine.chat_template.seen == [{"role": "user", "content": "Third"}]


def test_a_new_chat_stops_the_answer(page: Tab, engine: FakeEngine) -> None:
    engine.endless, engine.delay, engine.max_model_len = True, 0.1, 10**9
    send(page, "Go on")
    page.until("document.querySelector('.assistant .text') !== null")
    page.click("#clear")
    wait_for(lambda: engine.running == 0)
    page.until("document.querySelector('#send').checkVisibility()")
    assert page.run("document.querySelectorAll('#log *').length") == 0


def test_refusals_and_failures_are_shown(page: Tab, engine: FakeEngine) -> None:
    engine.refusal = QueueFull(9, 8)
    send(page, "Hi")
    wait_for_answer(page)
    assert "has all the requests it takes" in page.text("#status")
    assert page.run("document.querySelector('#status').className") == "error"
    assert last(page, ".rate").endswith("failed")
    engine.refusal = None
    engine.fail_after = 2
    send(page, "Hi again")
    wait_for_answer(page, 2)
    assert "Generation failed" in page.text("#status")
    assert last(page, ".text") == "".join(engine.reply[:2])
    engine.fail_after = None
    send(page, "x" * 600)
    wait_for_answer(page, 3)
    assert "context is 512 tokens" in page.text("#status")
    send(page, "Once more")
    wait_for_answer(page, 4)
    assert page.text("#status") == ""
    assert last(page, ".text") == engine.text
    # What failed without a word of an answer is not part of the conversation.
    assert engine.chat_template is not None
    said = [message["content"] for message in engine.chat_template.seen]
    assert said == ["Hi again", "".join(engine.reply[:2]), "Once more"]


def test_a_server_that_goes_away(browser: Browser) -> None:
    with (
        live(endless=True, delay=0.1, max_model_len=10**9) as server,
        browser.open(f"{server.url}/") as tab,
    ):
        ready(tab)
        send(tab, "Hi")
        tab.until("document.querySelector('.assistant .text') !== null")
        server.stop()
        wait_for_answer(tab)
        assert tab.text("#status") != ""
        assert tab.visible("#send")
        send(tab, "Still there?")
        wait_for_answer(tab, 2)
        assert last(tab, ".rate").endswith("failed")


@pytest.mark.parametrize("where", ["content", "reasoning", "user", "error", "model"])
def test_markup_is_only_text(browser: Browser, where: str) -> None:
    """Whoever writes it: the model, the user, a message of the server, the name of the model."""
    evil = (
        "<img src=x onerror=\"window.harmed = 'img'\"><script>window.harmed = 'script'</script>"
        "<svg onload=\"window.harmed = 'svg'\"></svg><a href=\"javascript:window.harmed = 'a'\">"
        "[x](javascript:alert(1)) **b** </p></article><style>*{display:none}</style>&lt;"
    )
    reply = [evil[i : i + 9] for i in range(0, len(evil), 9)]
    settings = Settings(names=(evil,)) if where == "model" else None
    more: dict[str, Any] = {"reply": ["fine"], "max_model_len": 4096}
    if where in ("content", "reasoning"):
        more["reply"] = reply if where == "content" else ["<think>", *reply]
    if where == "error":
        more["refusal"] = QueueFull(evil, 8)  # type: ignore[arg-type]
    with live(settings, **more) as server, browser.open(f"{server.url}/") as tab:
        ready(tab)
        send(tab, evil if where == "user" else "Hi")
        wait_for_answer(tab)
        place = {
            "content": ".assistant .text",
            "reasoning": ".assistant details p",
            "user": ".user .text",
            "error": "#status",
            "model": "#model option",
        }[where]
        assert evil in tab.text(place)
        assert tab.run("document.querySelectorAll('img, svg, a, b, style').length") == 0
        assert tab.run("document.querySelectorAll('script').length") == 1
        assert tab.run("typeof window.harmed") == "undefined"
        assert [url for url, _ in tab.requests if not url.startswith(f"{server.url}/")] == []
        refused = "Failed to load resource: the server responded with a status of 429"
        assert [text for text in tab.complaints if not text.startswith(refused)] == []


def test_a_key_is_asked_for(browser: Browser) -> None:
    with live(Settings(api_keys=("right key",))) as server, browser.open(f"{server.url}/") as tab:
        # The field is there at once, the words once the body of the refusal has been read.
        tab.until("document.querySelector('#keyrow').checkVisibility()")
        tab.until("document.querySelector('#status').textContent.includes('API key')")
        tab.type("#key", "wrong")
        tab.run("document.querySelector('#status').className = ''")
        tab.click("#usekey")
        tab.until(
            "document.querySelectorAll('#model option').length === 0 && "
            "document.querySelector('#status').className === 'error'"
        )
        tab.run("document.querySelector('#key').value = ''")
        tab.type("#key", "right key")
        tab.click("#usekey")
        ready(tab)
        assert not tab.visible("#keyrow")
        assert tab.text("#status") == ""
        send(tab, "Hi")
        wait_for_answer(tab)
        assert last(tab, ".text") == server.engine.text
        [headers] = [sent for url, sent in tab.requests if url.endswith("completions")]
        assert headers["Authorization"] == "Bearer right key"
        # Kept for this tab alone, and nowhere that others see.
        assert tab.run("localStorage.length") == 0
        assert not any("right" in url for url, _ in tab.requests)
        tab.go(f"{server.url}/")
        ready(tab)
        assert not tab.visible("#keyrow")
