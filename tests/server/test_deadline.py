"""The engine's `request_timeout` over HTTP: an answer that takes too long ends, in any form."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import grout
from server.opening import engine_options
from tests.server.fakes import Live, wait_for
from tests.server.test_operations import options
from tests.server.tiny import open_tiny

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": [72, 105], "max_tokens": 40_000},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    folder = tmp_path_factory.mktemp("models")
    with open_tiny(folder, request_timeout=0.5) as engine, Live(engine) as server:
        # Nothing else ends an answer: these weights know no end of sequence.
        engine.eos_token_ids = ()
        yield server


@pytest.fixture
def http(real: Live[grout.Engine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=60, trust_env=False) as client:
        yield client
    wait_for(lambda: real.engine.stats()["running"] + real.engine.stats()["waiting"] == 0)
    stats = real.engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert stats["requests_finished"] == 0


@pytest.mark.parametrize("path", BODIES)
def test_plain(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=BODIES[path])
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("path", BODIES)
def test_stream(real: Live[grout.Engine], http: httpx.Client, path: str) -> None:
    # On a busy machine the time may pass before there is a first token: then it is a 504.
    response = http.post(path, json={**BODIES[path], "stream": True})
    if response.status_code == 504:
        assert response.json()["error"]["code"] == "timeout"
        return
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    if path == "/v1/responses":
        last = json.loads(data[-1])
        assert last["type"] == "response.failed"
        assert "longer than this server allows" in last["response"]["error"]["message"]
    else:
        assert data.pop() == "[DONE]"
        assert json.loads(data[-1])["error"]["code"] == "timeout"
        assert all("error" not in json.loads(one) for one in data[:-1])


def test_the_option_is_the_engines() -> None:
    given = argparse.Namespace(**options("--request-timeout", "7.5"))
    assert engine_options(given) == {"request_timeout": 7.5}
    assert "request_timeout" not in engine_options(argparse.Namespace(**options()))
