"""The chat page's files and headers; what it does is in test_chromium.py."""

import re

import httpx

from server.settings import Settings
from tests.server.fakes import live


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
