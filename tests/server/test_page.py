"""The chat page: its headers, that it needs nothing from elsewhere, and a session in Chromium."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from server.settings import Settings
from tests.server.fakes import live

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_stands_alone(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert sorted(names) == ["static/chat.css", "static/chat.js"]
    for name in names:
        file = http.get(f"/{name}")
        assert file.status_code == 200
        assert "http://" not in file.text and "https://" not in file.text
    # What the policy would block.
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", page.text)


def test_the_page_opens_without_a_key() -> None:
    with (
        live(Settings(api_keys=("k",))) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert [http.get(p).status_code for p in ("/", "/static/chat.js", "/static/chat.css")] == [
            200
        ] * 3
        assert http.get("/static/../server/app.py").status_code == 401


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_session_in_chromium(tmp_path: Path) -> None:
    websockets = pytest.importorskip("websockets.sync.client")
    assert CHROMIUM is not None
    reply = ["<think>", "let me see", "</think>", "\n\n", "Hello ", "世界 🙂", " <b>x</b>"]
    with live(reply=reply, delay=0.02) as server:
        browser = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server",
             "--remote-debugging-port=0", f"--user-data-dir={tmp_path}", server.url],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = _port(tmp_path)
            with httpx.Client(trust_env=False) as http:
                pages = http.get(f"http://127.0.0.1:{port}/json").json()
            page = next(p for p in pages if p["type"] == "page")
            with websockets.connect(page["webSocketDebuggerUrl"]) as socket:
                _converse(socket)
            assert server.engine.finished == 1
            assert server.engine.aborted == 1
        finally:
            browser.kill()
            browser.wait()


def _port(folder: Path) -> int:
    file = folder / "DevToolsActivePort"
    end = time.monotonic() + 30
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < end, "chromium does not start"
        time.sleep(0.1)
    return int(file.read_text().splitlines()[0])


def _converse(socket: object) -> None:
    number = 0

    def run(script: str) -> object:
        nonlocal number
        number += 1
        message = {
            "id": number,
            "method": "Runtime.evaluate",
            "params": {"expression": script, "returnByValue": True},
        }
        socket.send(json.dumps(message))  # type: ignore[attr-defined]
        while True:
            answer = json.loads(socket.recv(timeout=20))  # type: ignore[attr-defined]
            if answer.get("id") == number:
                return answer["result"]["result"].get("value")

    def until(script: str) -> None:
        end = time.monotonic() + 20
        while not run(script):
            assert time.monotonic() < end, script
            time.sleep(0.05)

    until("document.querySelector('#model option') !== null")
    run("document.querySelector('#text').value = 'Hi'; document.querySelector('#send').click()")
    until("document.querySelector('.assistant .rate') !== null")
    assert run("document.querySelector('.assistant .text').textContent") == "Hello 世界 🙂 <b>x</b>"
    assert run("document.querySelector('details p').textContent") == "let me see"
    assert run("document.querySelector('details').open") is False
    assert "tok/s" in str(run("document.querySelector('.rate').textContent"))
    # The second answer is stopped.
    run("document.querySelector('#text').value = 'More'; document.querySelector('#send').click()")
    until("document.querySelectorAll('.assistant')[1]?.textContent.includes('Hello')")
    run("document.querySelector('#stop').click()")
    until("document.querySelectorAll('.rate').length === 2")
    assert "stopped" in str(run("document.querySelectorAll('.rate')[1].textContent"))
