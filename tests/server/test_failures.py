"""Clients that leave and engines that fail: requests end, and the server lives."""

import json
import logging
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from grout.errors import EngineDead, PromptTooLong, StepFailed
from tests.server.fakes import MODEL, FakeEngine, Live, live, wait_for

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


def send(server: Live[FakeEngine], path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection, the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    raw = json.dumps(body).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


def still_answers(http: httpx.Client, engine: FakeEngine) -> None:
    vars(engine).update(vars(FakeEngine()))
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["message"]["content"] == engine.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay", [0.002, 3600.0])
def test_leaving_aborts(
    server: Live[FakeEngine],
    http: httpx.Client,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    stream: bool,
    delay: float,
) -> None:
    engine.endless, engine.delay, engine.max_model_len = True, delay, 10**9
    with send(server, path, {**body, "stream": stream, "max_tokens": 10**8}) as connection:
        if stream and delay < 1:
            received = b""
            while received.count(b"data:") < 3:
                received += connection.recv(4096)
        wait_for(lambda: engine.running == 1)
    wait_for(lambda: engine.running == 0)
    assert (engine.aborted, engine.finished) == (1, 0)
    still_answers(http, engine)


def test_closing_the_clients_stream_aborts(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.endless, engine.delay = True, 0.005
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    next(stream)
    assert engine.running == 1
    stream.close()
    wait_for(lambda: engine.running == 0)
    assert engine.aborted == 1
    still_answers(http, engine)


def test_leaving_before_the_body_is_complete(
    server: Live[FakeEngine], http: httpx.Client, engine: FakeEngine
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )
    still_answers(http, engine)
    assert len(engine.requests) == 1


def test_a_client_that_stops_reading_holds_up_no_one(
    server: Live[FakeEngine], http: httpx.Client, engine: FakeEngine
) -> None:
    engine.reply = ["x" * 65536] * 400
    with send(server, "/v1/completions", {**PROMPT, "stream": True, "max_tokens": 401}):
        wait_for(lambda: engine.running == 1)
        other = http.post("/v1/completions", json={**PROMPT, "max_tokens": 1})
        assert other.json()["usage"]["completion_tokens"] == 1
        assert engine.running == 1
    wait_for(lambda: engine.running == 0)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RuntimeError("secret detail"), 500, "internal_error"),
        (StepFailed("the step failed: secret detail"), 500, "internal_error"),
        (EngineDead("restart: secret detail"), 503, "engine_down"),
    ],
)
def test_failing_at_once_is_a_5xx(
    http: httpx.Client,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    stream: bool,
    failure: Exception,
    status: int,
    code: str,
) -> None:
    engine.fail_after, engine.failure = 0, failure
    response = http.post(path, json={**body, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, "server_error", code)
    assert "log" in error["message"]
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    still_answers(http, engine)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_failing_in_a_plain_answer_is_a_500(
    http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.fail_after = 3
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    still_answers(http, engine)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_failing_in_a_stream_is_an_event(
    http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.fail_after = 3
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    *chunks, failed, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    error = json.loads(failed.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert len(chunks) == (4 if "chat" in path else 3)
    assert all(json.loads(chunk[6:])["choices"][0]["finish_reason"] is None for chunk in chunks)
    still_answers(http, engine)


def test_failing_in_a_stream_raises_in_the_client(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.fail_after = 3
    text = ""
    with client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    ) as stream:
        for _ in range(4):
            text += next(stream).choices[0].delta.content or ""
        with pytest.raises(openai.APIError, match="Generation failed"):
            next(stream)
    assert text == "".join(engine.reply[:3])


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long_for_the_engine(
    http: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    engine.fail_after, engine.failure = 0, PromptTooLong(700, 600)
    response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    assert "700" in error["message"]
    assert "600" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_never_says_why_it_ended(
    http: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    engine.finish = None
    response = http.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert '"internal_error"' in response.text


def test_stopping_the_server_ends_streams() -> None:
    with live(endless=True, delay=0.01, max_model_len=10**9) as server:
        body = {**PROMPT, "stream": True, "max_tokens": 10**8}
        with send(server, "/v1/completions", body) as connection:
            wait_for(lambda: server.engine.running == 1)
            server.stop()
            wait_for(lambda: server.engine.running == 0)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert server.engine.closed
    *_, failed, done = received.split(b"data: ")
    assert b'"engine_down"' in failed
    assert done.startswith(b"[DONE]")


def test_a_bug_in_a_route_is_a_500(http: httpx.Client, engine: FakeEngine) -> None:
    engine.tokenizer = None  # type: ignore[assignment]
    response = http.post("/v1/completions", json=PROMPT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "NoneType" not in response.text
    still_answers(http, engine)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (
            b'{"user":"\\ud83d\\ude00","messages":'
            + b"[" * 900
            + b'"",' * 100_000
            + b'""'
            + b"]" * 900
            + b"}",
            400,
        ),
        (b'{"messages":[' + b"1," * 300_000 + b"1]}", 400),
        (b'{"messages":[],"stop":[' + b"1," * 300_000 + b"1]}", 400),
        (b'{"messages":[],"tools":[' + b"1," * 300_000 + b"1]}", 400),
        (
            b'{"messages":[],"logit_bias":{'
            + b",".join(b'"%d":"x"' % i for i in range(100_000))
            + b"}}",
            400,
        ),
    ],
)
def test_large_bodies_hold_up_no_one(http: httpx.Client, body: bytes, status: int) -> None:
    started = time.process_time()
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == status
    # Of the server too, a thread of this process. Minutes where something grows with the square
    # of the body.
    assert time.process_time() - started < 10
