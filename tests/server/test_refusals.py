"""Every bad request: status, code, type and param, and a server that still answers."""

from typing import Any

import httpx
import pytest

from grout.errors import EngineClosed, InvalidPrompt, InvalidSamplingParams
from models.errors import ChatTemplateError
from tests.server.fakes import FakeEngine
from tests.server.refusal import CHAT, COMPLETIONS, MESSAGES, refused


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
