"""The server on the real engine, with a tiny model of made-up weights."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

import grout
from grout.readback import Readback
from grout.sequence import Sequence
from scripts.bench_serving import DEVICE_SECONDS
from tests.server.fakes import Live, wait_for
from tests.server.tiny import open_tiny

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi 🙂"}],
    "max_tokens": 40,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live[grout.Engine]]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    with open_tiny(folder, max_model_len=512) as engine, Live(engine) as live:
        yield live


@pytest.fixture
def http(real: Live[grout.Engine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": -5, "top_k": 10**12}])
def test_stream_equals_plain(http: httpx.Client, sampling: dict[str, int]) -> None:
    body = {**ASK, **sampling}
    plain = http.post("/v1/chat/completions", json=body).json()
    assert plain["model"] == "tiny"
    assert plain["usage"]["completion_tokens"] == 40
    assert plain["choices"][0]["finish_reason"] == "length"
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    *events, done, rest = streamed.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == plain["choices"][0]["message"]["content"]
    assert text


def test_leaving_frees_the_engine(real: Live[grout.Engine], http: httpx.Client) -> None:
    body = {**ASK, "max_tokens": 400, "stream": True}
    before = real.engine.stats()["pages_free"]
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
    wait_for(lambda: real.engine.stats()["requests_aborted"] == 1)
    assert real.engine.stats()["pages_free"] == before


@pytest.mark.parametrize("stream", [False, True])
def test_nan_in_one_request_ends_that_one_alone(
    real: Live[grout.Engine],
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    """A value in the cache of one of them is spoilt, as a fault of the device would."""
    runner, cache = real.engine.runner, real.engine.runner.cache
    asked = [{**ASK, "temperature": 0, "logit_bias": {str(i): 5}} for i in range(70, 74)]

    def content(body: dict[str, Any]) -> str:
        return str(http.post(CHAT, json=body).json()["choices"][0]["message"]["content"])

    alone = [content(body) for body in asked]
    assert len(set(alone)) == len(alone)
    spoilt: list[int] = []
    under_way, joined = threading.Event(), threading.Event()
    decode = runner.decode

    def spoil_and_decode(sequences: tuple[Sequence, ...], *rest: Any) -> Readback:
        for sequence in sequences:
            if sequence.params.priority != 7 or spoilt:
                continue
            under_way.set()
            assert joined.wait(60)
            if len(sequences) > 1:
                spoilt.extend(sequence.pages)
                _, values = cache.pages(0)
                values[sequence.pages[0], 1].copy_from(np.full(values.shape[2:], np.nan, "f"))
        return decode(sequences, *rest)

    monkeypatch.setattr(runner, "decode", spoil_and_decode)
    failed = real.engine.stats()["requests_failed"]
    victim = {**ASK, "max_tokens": 400, "priority": 7, "stream": stream}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(http.post, CHAT, json=victim)
        assert under_way.wait(60)
        beside = [pool.submit(content, body) for body in asked * 3]
        wait_for(lambda: real.engine.stats()["waiting"] > 0)
        joined.set()
        assert [one.result() for one in beside] == alone * 3
    assert spoilt
    assert answer.result().status_code == (200 if stream else 500)
    assert '"code":"internal_error"' in answer.result().text.replace(": ", ":")
    assert real.engine.stats()["requests_failed"] == failed + 1
    assert [content(body) for body in asked] == alone


def test_refusals_of_the_engine_itself(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "stop_token_ids": [320], "stream": True}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")


def test_what_the_engine_does_for_the_api(http: httpx.Client) -> None:
    ask = {**ASK, "temperature": 0, "max_tokens": 4}
    entries = http.post(CHAT, json={**ask, "logprobs": True, "top_logprobs": 3}).json()
    [choice] = entries["choices"]
    content = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    biased = http.post(CHAT, json={**ask, "logit_bias": {"65": 100}}).json()
    assert biased["choices"][0]["message"]["content"] == "AAAA"
    several = http.post(CHAT, json={**ask, "n": 3}).json()["choices"]
    assert len({choice["message"]["content"] for choice in several}) == 1
    picked = http.post("/v1/completions", json={"prompt": "Hi", "guided_choice": ["yes", "no"]})
    assert picked.json()["choices"][0]["text"] in ("yes", "no")


def test_the_time_of_steps_is_counted(real: Live[grout.Engine], http: httpx.Client) -> None:
    def busy() -> float:
        found = DEVICE_SECONDS.search(http.get("/metrics").text)
        assert found is not None
        return float(found[1])

    before, start = busy(), time.monotonic()
    http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 8}).raise_for_status()
    assert 0 < busy() - before < time.monotonic() - start
