"""Bodies that are refused before what they ask for is looked at, or in whatever place it is."""

import json

import httpx
import pytest

from server.body import parse_json
from server.errors import ApiError
from server.settings import Settings
from server.strict_json import MAX_VALUES
from tests.server.fakes import FakeEngine, live
from tests.server.refusal import CHAT, COMPLETIONS, MESSAGES, refused


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "Expecting value at line 1 column 1"),
        (b'{"model": ', "line 1 column 11"),
        (b'{"messages": []', "line 1 column 16"),
        (b"[]", "an array, not an object"),
        (b'"text"', "a string"),
        (b"3", "a number"),
        (b"true", "a boolean"),
        (b"null", "null"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": 1, "n": 2, "seed": 1}', "key 'seed' comes more than once"),
        (b'{"chat_template_kwargs": {"\\u00e9": 1, "\xc3\xa9": 2}}', "key 'é' comes more"),
        (b'{"temperature": Infinity}', "Infinity is not"),
        (b'{"temperature": 1e999}', "number 1e999 is too large"),
        (b'{"chat_template_kwargs": {"a": [-1.5e309]}}', "number -1.5e309 is too large"),
        (b'{"a": ' + b"1" * 400 + b".0}", "1... is too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_malformed_json(http: httpx.Client, path: str, raw: bytes, says: str) -> None:
    assert says in refused(http, path, raw, "invalid_json", None)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_content_type(http: httpx.Client, content_type: str) -> None:
    response = http.post(CHAT, content=b"{}", headers={"Content-Type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_body_size() -> None:
    with (
        live(Settings(max_body_bytes=1000)) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        refused(http, CHAT, b" " * 1001, "request_too_large", None, 413)
        refused(http, CHAT, b" " * 10**6, "request_too_large", None, 413)
        whole = json.dumps({"messages": MESSAGES}).encode()
        whole += b" " * (1000 - len(whole))
        for pieces, status in (([whole], 200), ([whole, b" "], 413), ([b" " * 9] * 10**4, 413)):
            response = http.post(
                CHAT, content=iter(pieces), headers={"Content-Type": "application/json"}
            )
            assert response.request.headers["transfer-encoding"] == "chunked"
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" + b"{}," * MAX_VALUES + b"1]",
        b"[" + b'"x",' * MAX_VALUES + b"1]",
        b"[" + b'"",' * (5 * MAX_VALUES) + b"1]",
        b"[" * (MAX_VALUES + 1),
        b"{" + b'"a":1,' * MAX_VALUES + b'"b":1}',
    ],
)
def test_more_values_than_there_may_be(http: httpx.Client, value: bytes) -> None:
    refused(http, COMPLETIONS, b'{"prompt": ' + value + b"}", "request_too_large", None, 413)
    other = b'{"messages": [], "metadata": ' + value + b"}"
    refused(http, CHAT, other, "request_too_large", None, 413)


@pytest.mark.parametrize("text", [b"a, [{", rb"\",", rb"\\,", rb"\\\",[", rb"\n,"])
def test_what_is_in_strings_is_no_value(text: bytes) -> None:
    many = text * MAX_VALUES
    assert parse_json(b'{"a": "' + many + b'", "b": [1]}')["b"] == [1]
    ids = b"[" + b"1," * (MAX_VALUES - 4) + b"1]"
    assert len(parse_json(b'{"a": "' + many + b'", "b": ' + ids + b"}")["b"]) == MAX_VALUES - 3
    with pytest.raises(ApiError, match="JSON values"):
        parse_json(b'{"a": "' + many + b'", "b": [1, ' + ids + b"]}")


def test_a_long_body_is_taken_as_a_short_one(http: httpx.Client, engine: FakeEngine) -> None:
    """In a thread; errors leave from there as from here."""
    long = "x" * 100_000
    body = {"messages": MESSAGES, "metadata": {"a": long}}
    assert http.post(CHAT, json=body).status_code == 200
    refused(http, CHAT, {**body, "temperature": 3}, "invalid_value", "temperature")
    refused(http, CHAT, {**body, "messages": []}, "invalid_value", "messages")
    refused(http, CHAT, json.dumps(body).encode()[:-1], "invalid_json", None)


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("escape", [rb"\ud800", rb"\uDFFF", rb"ok \uD83D\uD83D\ude42"])
def test_lone_surrogates(
    http: httpx.Client, engine: FakeEngine, stream: bytes, escape: bytes
) -> None:
    text = b'"' + escape + b'", "stream": ' + stream
    chat = b'{"messages": [{"role": "user", "content": "' + escape + b'"}], "stream": ' + stream
    refused(http, CHAT, chat + b"}", "invalid_unicode", "messages[0].content")
    refused(http, COMPLETIONS, b'{"prompt": ' + text + b"}", "invalid_unicode", "prompt")
    stop = b'{"prompt": "x", "stop": ["a", "' + escape + b'"]}'
    refused(http, COMPLETIONS, stop, "invalid_unicode", "stop[1]")
    model = b'{"prompt": "x", "model": "' + escape + b'"}'
    refused(http, COMPLETIONS, model, "invalid_unicode", "model")
    extra = b'{"messages": [], "chat_template_kwargs": {"k": "' + escape + b'"}}'
    refused(http, CHAT, extra, "invalid_unicode", "chat_template_kwargs.k")
    assert len(engine.requests) == 5


def test_lone_surrogate_in_a_name(http: httpx.Client) -> None:
    response = http.post(
        CHAT, content=rb'{"\ud800": 1}', headers={"Content-Type": "application/json"}
    )
    assert response.json()["error"]["code"] == "invalid_unicode"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (r'{"a": "\ud800"}', "invalid_unicode"),
        (r'{"a": [{"\udfff": 1}]}', "invalid_unicode"),
        ('{"a": NaN}', "invalid_value"),
        ('{"a": -Infinity}', "invalid_value"),
        ('{"a": 1e999}', "invalid_value"),
        ('{"a": 1', "invalid_value"),
        ("[" * 100_000, "invalid_value"),
        ('{"a": [' + "{}," * MAX_VALUES + "1]}", "invalid_value"),
    ],
)
def test_arguments_of_earlier_calls(http: httpx.Client, arguments: str, code: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    where = f"messages[{len(MESSAGES)}].tool_calls[0].function.arguments"
    refused(http, CHAT, json.dumps({"messages": talk}).encode(), code, where)
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
    refused(http, "/v1/responses", json.dumps({"input": items}).encode(), code, "input")


@pytest.mark.parametrize("schema", [r'{"const": "\ud800"}', '{"const": NaN}', '{"const": 1e999}'])
def test_schemas_in_strings(http: httpx.Client, schema: str) -> None:
    code = "invalid_unicode" if "ud800" in schema else "invalid_value"
    body = json.dumps({"prompt": "x", "guided_json": schema}).encode()
    refused(http, COMPLETIONS, body, code, "guided_json")


def test_whole_surrogate_pairs_are_text(http: httpx.Client, engine: FakeEngine) -> None:
    body = rb'{"messages": [{"role": "user", "content": "\ud83d\ude42"}]}'
    headers = {"Content-Type": "application/json"}
    assert http.post(CHAT, content=body, headers=headers).status_code == 200
    assert engine.prompt() == "<user>🙂\n<assistant>"
