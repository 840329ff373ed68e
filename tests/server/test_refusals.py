"""Every bad request: status, code, type and param, and a server that still answers."""

import json
from typing import Any

import httpx
import pytest

from grout.errors import EngineClosed, InvalidPrompt, InvalidSamplingParams
from models.errors import ChatTemplateError
from server.body import parse_json
from server.errors import ApiError
from server.settings import Settings
from server.strict_json import MAX_VALUES
from tests.server.fakes import FakeEngine, live

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def refused(
    http: httpx.Client,
    path: str,
    body: dict[str, Any] | bytes,
    code: str,
    param: str | None,
    status: int = 400,
) -> str:
    """Send, check the refusal and that the next request is answered; return the message."""
    if isinstance(body, bytes):
        headers = {"Content-Type": "application/json"}
        response = http.post(path, content=body, headers=headers)
    else:
        response = http.post(path, json=body)
    error = response.json()["error"]
    got = (response.status_code, error["type"], error["code"], error["param"])
    assert got == (status, "invalid_request_error", code, param), error
    assert response.headers["content-type"] == "application/json"
    after = http.post(CHAT, json={"messages": MESSAGES})
    # A broken template or engine of the test goes on refusing, but it answers.
    assert after.status_code < 500
    return str(error["message"])


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
    ("name", "value", "code"),
    [
        ("max_tokens", -1, "invalid_value"),
        *[("max_tokens", value, "invalid_type") for value in (1.5, 16.0, "16", True, [1])],
        *[("temperature", value, "invalid_value") for value in (-0.1, 2.1)],
        ("temperature", {}, "invalid_type"),
        *[("temperature", value, "invalid_type") for value in ("1", True)],
        *[("top_p", value, "invalid_value") for value in (0, -1, 1.01)],
        ("top_k", -2, "invalid_value"),
        *[("top_k", value, "invalid_type") for value in (1.5, "1", False)],
        *[("min_p", value, "invalid_value") for value in (-0.1, 1.1)],
        *[("seed", value, "invalid_type") for value in (1.0, "1", True)],
        *[("seed", value, "invalid_value") for value in (2**63, -(2**63) - 1, 10**40)],
        *[("n", value, "invalid_value") for value in (0, 129)],
        ("n", "1", "invalid_type"),
        *[("presence_penalty", value, "invalid_value") for value in (-2.1, 2.1)],
        *[("frequency_penalty", value, "invalid_value") for value in (-2.1, 2.1)],
        *[("repetition_penalty", value, "invalid_value") for value in (0, -1)],
        *[
            ("logit_bias", {key: 1}, "invalid_value")
            for key in ("257", "-1", "x", "\uff11", "9" * 11)
        ],
        ("logit_bias", {"1": 1, "01": 2}, "invalid_value"),
        ("logit_bias", [], "invalid_type"),
        ("min_tokens", -1, "invalid_value"),
        ("priority", 0.5, "invalid_type"),
        ("guided_choice", [], "invalid_value"),
        ("guided_grammar", "start: (", "invalid_value"),
        ("guided_regex", "(", "invalid_value"),
        ("guided_json", "{", "invalid_value"),
        ("response_format", "text", "invalid_type"),
        ("stop", 1, "invalid_type"),
        ("stop", {}, "invalid_type"),
        ("stop", ["a"] * 17, "invalid_value"),
        ("stop_token_ids", 3, "invalid_type"),
        ("ignore_eos", 1, "invalid_type"),
        ("stream", "yes", "invalid_type"),
        ("stream_options", [], "invalid_type"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("model", 3, "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_values(http: httpx.Client, path: str, name: str, value: Any, code: str) -> None:
    required = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    message = refused(http, path, {**required, name: value}, code, name)
    assert f"'{name}'" in message


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"stop": ["a"] * 20}, "stop", "takes at most 16 items, got 20"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids", "takes at most 16 items, got 17"),
    ],
)
def test_how_many_items(http: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    message = refused(http, CHAT, {"messages": MESSAGES, **change}, "invalid_value", param)
    assert message == f"Invalid '{param}': it {says}."


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"stop": [1]}, "stop[0]", "invalid_type"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": ""}, "stop[0]", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens", "invalid_type"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
        (
            {"stream": True, "stream_options": {"more": 1}},
            "stream_options.more",
            "unknown_parameter",
        ),
    ],
)
def test_wrong_parts(http: httpx.Client, change: dict[str, Any], param: str, code: str) -> None:
    refused(http, CHAT, {"messages": MESSAGES, **change}, code, param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("modalities", ["audio"]),
        ("suffix", "x"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("prompt_logprobs", 1),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("continue_final_message", True),
        ("web_search_options", {}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unsupported_parameters(http: httpx.Client, path: str, name: str, value: Any) -> None:
    required = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    message = refused(http, path, {**required, name: value}, "unsupported_parameter", name)
    assert f"'{name}'" in message


def test_null_is_as_absent_everywhere(http: httpx.Client) -> None:
    nothing = {"foo": None, "temprature": None}
    function = {"name": "f", "parameters": {"type": "object"}, **nothing}
    body = {
        "messages": [{"role": "user", "content": "Hi", **nothing}],
        "stream": True,
        "stream_options": {"include_usage": True, **nothing},
        "tools": [{"type": "function", "function": function, **nothing}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}, **nothing}},
        "structured_outputs": nothing,
        **nothing,
    }
    assert http.post(CHAT, json=body).status_code == 200
    responses = {
        "input": "x",
        "tools": [{"type": "function", "name": "f", **nothing}],
        "reasoning": nothing,
        **nothing,
    }
    assert http.post("/v1/responses", json=responses).status_code == 200
    for path, prompt in (("/tokenize", {"prompt": "x"}), (COMPLETIONS, {"prompt": "x"})):
        assert http.post(path, json=prompt | nothing).status_code == 200
        refused(http, path, prompt | {"foo": 0}, "unknown_parameter", "foo")


def test_unknown_parameters(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "temprature": 1}
    assert "'temprature'" in refused(http, CHAT, body, "unknown_parameter", "temprature")
    refused(http, CHAT, {"messages": MESSAGES, "prompt": "x"}, "unknown_parameter", "prompt")
    refused(http, COMPLETIONS, {"prompt": "x", "messages": []}, "unknown_parameter", "messages")


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ("Hi", "messages", "invalid_type"),
        (None, "messages", "invalid_type"),
        (["Hi"], "messages[0]", "invalid_type"),
        ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "invalid_type"),
        (
            [{"role": "tool", "content": "x"}],
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
        ([{"role": "function", "content": "x"}], "messages[0].role", "unsupported_value"),
        ([*MESSAGES, {"role": "user"}], "messages[1].content", "missing_required_parameter"),
        ([{"role": "user", "content": None}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": 3}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": {}}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_type"),
        (
            [{"role": "user", "content": [{"text": "x"}]}],
            "messages[0].content[0].type",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "messages[0].content[0].text",
            "invalid_type",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        ([{"role": "user", "content": "x", "nmae": "y"}], "messages[0].nmae", "unknown_parameter"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name", "invalid_type"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{"id": "a"}]}],
            "messages[0].tool_calls",
            "unknown_parameter",
        ),
    ],
)
def test_messages(http: httpx.Client, messages: Any, param: str, code: str) -> None:
    refused(http, CHAT, {"messages": messages}, code, param)


def test_image_parts_are_refused_by_name(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    message = refused(http, CHAT, body, "unsupported_value", "messages[0].content[0].type")
    assert "'image_url'" in message


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ("", "prompt", None),
        ([], "prompt", "invalid_value"),
        (3, "prompt", "invalid_type"),
        (None, "prompt", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        (["a", 1], "prompt[1]", "invalid_type"),
        ([[1], [2, 257]], "prompt[1][1]", "invalid_value"),
        ([[]], "prompt[0]", "invalid_value"),
        (["a"] * 257, "prompt", "invalid_value"),
        ([1, 257], "prompt[1]", "invalid_value"),
        ([-1], "prompt[0]", "invalid_value"),
        ([True], "prompt[0]", "invalid_type"),
        ([1.0], "prompt[0]", "invalid_type"),
    ],
)
def test_prompts(http: httpx.Client, prompt: Any, param: str, code: str | None) -> None:
    if code is None:  # the fake tokenizer begins every sequence, so "" is one token
        assert http.post(COMPLETIONS, json={"prompt": prompt}).status_code == 200
    else:
        refused(http, COMPLETIONS, {"prompt": prompt}, code, param)


def test_required_parameters(http: httpx.Client) -> None:
    refused(http, CHAT, {}, "missing_required_parameter", "messages")
    refused(http, COMPLETIONS, {}, "missing_required_parameter", "prompt")


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})]
)
def test_unknown_model(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    message = refused(http, path, {"model": "gpt-9", **body}, "model_not_found", "model", 404)
    assert "'gpt-9'" in message
    assert "'acme/tiny-1'" in message


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(
    http: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 600}], "stream": stream}
    message = refused(http, CHAT, body, "context_length_exceeded", "messages")
    assert "512" in message
    assert str(len("<user>\n<assistant>") + 600) in message
    body = {"prompt": [1] * 512, "stream": stream}
    message = refused(http, COMPLETIONS, body, "context_length_exceeded", "prompt")
    assert message.count("512") == 2
    assert len(engine.requests) == 2  # the two good requests of `refused` alone


def test_explicit_max_tokens_must_fit(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"prompt": [1] * 500, "max_tokens": 13}
    message = refused(http, COMPLETIONS, body, "context_length_exceeded", "prompt")
    assert all(number in message for number in ("512", "500", "13"))
    assert http.post(COMPLETIONS, json={**body, "max_tokens": 12}).status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": [1] * 500}).status_code == 200
    assert engine.requests[-1][1].max_tokens == 12


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


@pytest.mark.parametrize("name", ["tools", "messages", "add_generation_prompt", "self"])
def test_reserved_template_variables(http: httpx.Client, name: str) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: []}}
    refused(http, CHAT, body, "unsupported_parameter", f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ChatTemplateError("roles must alternate"), "roles must alternate"),
        (TypeError("x"), "failed"),
    ],
)
def test_template_refuses(
    http: httpx.Client, engine: FakeEngine, failure: Exception, says: str
) -> None:
    assert engine.chat_template is not None
    engine.chat_template.failure = failure
    assert says in refused(http, CHAT, {"messages": MESSAGES}, "chat_template_error", "messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "param"),
    [
        (InvalidSamplingParams("stop_token_ids", "too large"), "stop_token_ids"),
        (InvalidPrompt("no such token"), "prompt"),
    ],
)
def test_refusals_of_the_engine(
    http: httpx.Client, engine: FakeEngine, refusal: Exception, param: str, stream: bool
) -> None:
    engine.refusal = refusal
    body = {"prompt": "x", "stream": stream}
    assert str(refusal) in refused(http, COMPLETIONS, body, "invalid_value", param)


@pytest.mark.parametrize("stream", [False, True])
def test_closed_engine(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.refusal = EngineClosed("the engine was closed")
    response = http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (
        503,
        "server_error",
        "engine_down",
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_far_too_long_is_refused_without_encoding_it(
    path: str, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine.tokenizer.encode

    def short(text: str, **options: Any) -> list[int]:
        assert len(text) < 5 * engine.max_model_len, "encoded"
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", short)
    text = "x" * (6 * engine.max_model_len)
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    param = "messages" if path == CHAT else "prompt"
    message = refused(http, path, body, "context_length_exceeded", param)
    assert "at least" in message and str(engine.max_model_len) in message
