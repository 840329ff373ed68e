"""What a real engine's server refuses, by name, before a byte of a stream; and clients that die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import grout
from server.settings import Settings
from tests.server.fakes import Live, live, wait_for
from tests.server.scripts import asking

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


@pytest.fixture(autouse=True)
def lives(scripted_http: httpx.Client) -> Iterator[None]:
    """After each refusal the next request is answered as ever."""
    yield
    answer = scripted_http.post(CHAT, json=asking("hi")).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, how are you?"


def refused(
    http: httpx.Client, path: str, body: dict[str, Any] | bytes, param: str | None, code: str
) -> str:
    raw = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json"}
    answer = http.post(path, headers=headers, **raw)  # type: ignore[arg-type]
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    return str(error["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (PLAIN, {"prompt": ""}, "prompt", "invalid_value"),
        (PLAIN, {"prompt": []}, "prompt", "invalid_value"),
        (PLAIN, {"prompt": ["a", ""]}, "prompt[1]", "invalid_value"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "22"}]},
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "invalid_type",
        ),
    ],
)
def test_nothing_to_answer(
    scripted_http: httpx.Client,
    path: str,
    body: dict[str, Any],
    param: str,
    code: str,
    stream: bool,
) -> None:
    refused(scripted_http, path, {**body, "stream": stream}, param, code)


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("half", [rb"\ud83d", rb"\ude00\ud83d", rb"\uD83Dx\uDE00"])
def test_lone_surrogates(scripted_http: httpx.Client, half: bytes, stream: bytes) -> None:
    end = b'"}], "stream": ' + stream + b"}"
    chat = b'{"messages": [{"role": "user", "content": "' + half + end
    refused(scripted_http, CHAT, chat, "messages[0].content", "invalid_unicode")
    plain = b'{"prompt": "' + half + b'", "stream": ' + stream + b"}"
    refused(scripted_http, PLAIN, plain, "prompt", "invalid_unicode")
    tool = b'{"messages": [{"role": "tool", "tool_call_id": "a", "content": "' + half + end
    refused(scripted_http, CHAT, tool, "messages[0].content", "invalid_unicode")
    responses = b'{"input": "' + half + b'", "stream": ' + stream + b"}"
    refused(scripted_http, "/v1/responses", responses, "input", "invalid_unicode")


def test_biases_at_the_end_of_the_vocabulary(
    scripted: Live[grout.Engine], scripted_http: httpx.Client
) -> None:
    size = scripted.engine.vocab_size
    ask = {"messages": [USER], "max_tokens": 2, "temperature": 0}
    last = {**ask, "logit_bias": {str(size - 1): 100}, "logprobs": True, "ignore_eos": True}
    entries = scripted_http.post(CHAT, json=last).json()["choices"][0]["logprobs"]["content"]
    assert bytes(entries[0]["bytes"]) == scripted.engine.tokenizer.token_bytes(size - 1)
    for token in (size, size + 1, 10**9):
        body = {**ask, "logit_bias": {str(token): 1}}
        says = refused(scripted_http, CHAT, body, "logit_bias", "invalid_value")
        assert str(token) in says and str(size - 1) in says


def test_prompt_ids_up_to_the_end_of_the_embedding(
    scripted: Live[grout.Engine], scripted_http: httpx.Client
) -> None:
    """Ids past the tokenizer's last, which a padded or made-up model has, are taken: no text."""
    size = scripted.engine.vocab_size
    assert size > scripted.engine.tokenizer.vocab_size
    ask = {"max_tokens": 1, "temperature": 0, "echo": True}
    said = scripted_http.post(PLAIN, json={**ask, "prompt": [size - 1, 65, size - 1]}).json()
    assert said["usage"]["prompt_tokens"] == 3
    assert said["choices"][0]["text"].startswith(scripted.engine.tokenizer.decode([65]))
    for token in (size, 10**9, -1):
        says = refused(
            scripted_http, PLAIN, {**ask, "prompt": [token]}, "prompt[0]", "invalid_value"
        )
        assert str(size - 1) in says


SCHEMA = {"type": "object", "properties": {"a": {"items": {"type": "banana"}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}},
            "response_format.json_schema.schema",
            word,
        )
        for s, word in (
            ({"type": "banana"}, "banana"),
            (SCHEMA, "banana"),
            ({"$ref": "#/nowhere"}, "nowhere"),
            ({"type": "string", "pattern": "("}, "unclosed group"),
            ({"type": "object", "properties": 3}, "properties"),
            ({"enum": []}, "Unsatisfiable"),
            ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        )
    ]
    + [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "[z-a]"}, "guided_regex", "range"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_json": SCHEMA}, "guided_json", "banana"),
        ({"guided_choice": [""]}, "guided_choice", ""),
    ],
)
def test_what_cannot_be_enforced(
    scripted_http: httpx.Client, more: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    body = {"messages": [USER], "max_tokens": 4, "stream": stream, **more}
    assert says in refused(scripted_http, CHAT, body, param, "invalid_value")


@pytest.mark.parametrize(
    ("settings", "path", "status", "code"),
    [
        (Settings(), CHAT, 405, "method_not_allowed"),
        (Settings(), "/socket", 404, "not_found"),
        (Settings(api_keys=("secret",)), CHAT, 401, "invalid_api_key"),
        (Settings(api_keys=("secret",)), "/socket", 401, "invalid_api_key"),
    ],
)
def test_no_connection_becomes_a_websocket(
    settings: Settings, path: str, status: int, code: str
) -> None:
    """Keys and limits are asked of HTTP alone."""
    with (
        live(settings) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        response = http.get(
            path,
            headers={
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            },
        )
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
@pytest.mark.parametrize("stream", [False, True])
def test_parts_that_are_no_text(scripted_http: httpx.Client, kind: str, stream: bool) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    body = {"messages": [USER, {"role": "user", "content": parts}], "stream": stream}
    where = "messages[1].content[1].type"
    assert f"'{kind}'" in refused(scripted_http, CHAT, body, where, "unsupported_value")


KILLED = """
import sys, httpx
httpx.post(sys.argv[1], content=sys.argv[2], timeout=600, trust_env=False,
           headers={"Content-Type": "application/json"})
"""


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_killed_client_ends_its_requests(scripted: Live[grout.Engine], stream: str) -> None:
    engine = scripted.engine
    before = engine.stats()
    body = (
        '{"messages": [{"role": "user", "content": "<|loop|>"}], "n": 4, "stream": ' + stream + "}"
    )
    command = [sys.executable, "-c", KILLED, f"{scripted.url}{CHAT}", body]
    with subprocess.Popen(command) as process:
        try:
            wait_for(lambda: engine.stats()["running"] == 4, seconds=60)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0, seconds=30)
    after = engine.stats()
    # They were ended: each would have gone on to the end of the context.
    assert after["requests_aborted"] == before["requests_aborted"] + 4
    assert after["generated_tokens"] - before["generated_tokens"] < 4 * 1500
    assert after["pages_free"] == before["pages_free"] == after["pages_total"]


def test_a_client_that_waits_no_longer(scripted: Live[grout.Engine]) -> None:
    aborted = scripted.engine.stats()["requests_aborted"]
    with (
        openai.OpenAI(
            base_url=f"{scripted.url}/v1",
            api_key="unused",
            max_retries=0,
            timeout=httpx.Timeout(30, read=0.2),
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.chat.completions.create(**asking("loop"))
    wait_for(lambda: scripted.engine.stats()["running"] == 0, seconds=30)
    assert scripted.engine.stats()["requests_aborted"] == aborted + 1
