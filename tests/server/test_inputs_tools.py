"""Tool calls of a real engine: found as they stream, forced by a grammar, and left alone."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted import marker
from tests.server.scripts import ARGUMENTS, BAD_CALL, CALL_BODY, CUT_CALL, SCRIPTS, asking


def tool(name: str, properties: dict[str, Any]) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "string", "enum": ["東京", 'Zürich "Z"', "横浜"]}
TOOLS = [
    tool("get_weather", {"city": CITY, "注": {"enum": [{"深": [3, None]}, False]}}),
    tool("get_time", {"zone": {"enum": ["UTC+8", "UTC"]}}),
]


def answers(client: openai.OpenAI, name: str, **more: Any) -> tuple[Any, str | None, list[Any]]:
    """The message, its finish reason and the deltas, which come to the same."""
    options = asking(name, **{"tools": TOOLS, "temperature": 0, **more})
    choice = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.create(**options, stream=True) as stream:
        parts = [chunk.choices[0] for chunk in stream]
    deltas: list[Any] = [part.delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == (getattr(choice.message, "reasoning_content", None) or "")
    calls: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta.tool_calls or ()):
        if part.id is not None:
            assert (part.index, part.type) == (len(calls), "function")
            calls.append((part.function.name, ""))
        found, arguments = calls[part.index]
        calls[part.index] = (found, arguments + part.function.arguments)
    assert calls == [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    ]
    reasons = [part.finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
    return choice.message, choice.finish_reason, deltas


def test_nested_arguments_in_chinese(scripted_client: openai.OpenAI) -> None:
    tokens = [piece for piece in SCRIPTS["call"] if isinstance(piece, bytes)]
    assert sum("\ufffd" in token.decode(errors="replace") for token in tokens) > 10
    message, reason, _ = answers(scripted_client, "call")
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert json.loads(call.function.arguments)["注"]["😀"] == "👩\u200d🚀"
    assert (message.content, reason) == (None, "tool_calls")


def test_several_calls_with_tags_over_tokens(scripted_client: openai.OpenAI) -> None:
    tokens = [piece for piece in SCRIPTS["calls"] if isinstance(piece, bytes)]
    assert not any(b"tool_call>" in token for token in tokens)
    message, reason, _ = answers(scripted_client, "calls")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_time", '{"zone": "UTC+8"}'),
        ("ping", "{}"),
    ]
    assert message.content == "Both: 三"
    assert (message.reasoning_content, reason) == ("Two.", "tool_calls")
    assert len({call.id for call in message.tool_calls}) == 2
    one, reason, _ = answers(scripted_client, "calls", parallel_tool_calls=False)
    assert [call.function.name for call in one.tool_calls] == ["get_time"]
    assert reason == "tool_calls"


def test_ending_inside_a_call_sends_what_was_generated(scripted_client: openai.OpenAI) -> None:
    message, reason, _ = answers(scripted_client, "cut call")
    assert message.tool_calls is None
    assert (message.content, reason) == (f"<tool_call>{CUT_CALL}", "stop")


@pytest.mark.parametrize("size", [1, 2, 11, *range(38, 44), 70])
def test_the_limit_inside_a_call_sends_what_was_generated(
    scripted_client: openai.OpenAI, size: int
) -> None:
    pieces = [p if isinstance(p, bytes) else p.encode() for p in SCRIPTS["call"][:size]]
    message, reason, _ = answers(scripted_client, "call", max_completion_tokens=size)
    assert message.tool_calls is None
    # Without the character that the limit is inside of, if any.
    assert message.content == b"".join(pieces).decode(errors="ignore")
    assert reason == "length"


def test_the_limit_after_a_call(scripted_client: openai.OpenAI) -> None:
    size = len(SCRIPTS["call"]) - 1  # all but the end of the reply
    message, reason, _ = answers(scripted_client, "call", max_completion_tokens=size)
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
    assert (message.content, reason) == (None, "length")


@pytest.mark.parametrize(
    ("name", "more", "content"),
    [
        ("bad call", {}, BAD_CALL),
        ("call", {"tool_choice": "none"}, f"<tool_call>{CALL_BODY}</tool_call>"),
        ("hi", {}, "Hello, how are you?"),
        ("thought call", {}, "no call"),
    ],
)
def test_what_is_no_call_is_content(
    scripted_client: openai.OpenAI, name: str, more: dict[str, Any], content: str
) -> None:
    message, reason, _ = answers(scripted_client, name, **more)
    assert message.tool_calls is None
    assert (message.content, reason) == (content, "stop")
    if name == "thought call":
        assert message.reasoning_content == "<tool_call>{}</tool_call> was a thought"


@pytest.mark.parametrize(
    ("name", "variables", "reasoning"),
    [
        ("hi", {"enable_thinking": False}, None),
        ("call", {"enable_thinking": False}, None),
        ("late thought", {"enable_thinking": False}, None),
        # A thought may come first where thinking is on.
        ("call", {}, None),
        ("opened thought", {"begins_thinking": True}, "We see: 又"),
    ],
)
def test_a_call_is_forced(
    scripted_client: openai.OpenAI,
    scripted_http: httpx.Client,
    name: str,
    variables: dict[str, Any],
    reasoning: str | None,
) -> None:
    """Whatever the model would rather say."""
    [opening] = scripted_http.post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    message, reason, deltas = answers(
        scripted_client,
        name,
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=100,
        # Where the script's own token is masked, rather a call than space without end.
        logit_bias={str(opening): 5},
        extra_body={"chat_template_kwargs": variables},
    )
    [call] = message.tool_calls
    assert_valid(call)
    assert (message.content, reason) == (None, "tool_calls")
    assert getattr(message, "reasoning_content", None) == reasoning
    # Arguments of forced calls stream as they are generated.
    assert len([delta for delta in deltas if delta.tool_calls]) > 3


def assert_valid(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments.keys() == {"city", "注"}
        assert arguments["city"] in CITY["enum"]
        assert arguments["注"] in ({"深": [3, None]}, False)
    else:
        assert call.function.name == "get_time"
        assert arguments in ({"zone": "UTC+8"}, {"zone": "UTC"})


@pytest.mark.parametrize("named", ["get_weather", "get_time"])
@pytest.mark.parametrize("name", ["hi", "call"])
def test_the_named_function_is_called(
    scripted_client: openai.OpenAI, name: str, named: str
) -> None:
    message, reason, _ = answers(
        scripted_client,
        name,
        tool_choice={"type": "function", "function": {"name": named}},
        extra_body={"enable_thinking": False},
        max_completion_tokens=100,
    )
    [call] = message.tool_calls
    assert call.function.name == named
    assert_valid(call)
    assert reason == "tool_calls"


@pytest.mark.parametrize("size", range(41, 50, 3))
def test_a_forced_call_cut_off(scripted_client: openai.OpenAI, size: int) -> None:
    message, reason, _ = answers(
        scripted_client,
        "hi",
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        extra_body={"enable_thinking": False},
        max_completion_tokens=size,
    )
    [call] = message.tool_calls
    assert call.function.arguments.startswith("{")
    assert "}" not in call.function.arguments
    assert (message.content, reason) == (None, "length")


def test_a_forced_call_cut_inside_a_character(scripted_client: openai.OpenAI) -> None:
    """The arguments end before it; what the limit left of it has its log probabilities."""
    inside = 0
    for size in range(46, 54):
        options = asking(
            "call",
            tools=[tool("get_weather", {"city": {"enum": ["東京"]}})],
            temperature=0,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            extra_body={"enable_thinking": False},
            max_completion_tokens=size,
        )
        choice = scripted_client.chat.completions.create(**options, logprobs=True).choices[0]
        assert choice.logprobs is not None
        raw = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
        text = raw.decode(errors="ignore")
        inside += len(text.encode()) < len(raw)
        arguments = "".join(
            call.function.arguments  # type: ignore[union-attr]
            for call in choice.message.tool_calls or ()
        )
        assert "\ufffd" not in arguments + (choice.message.content or "")
        assert not arguments or text.endswith(arguments)
        with scripted_client.chat.completions.create(**options, stream=True) as stream:
            parts = [call for c in stream for call in c.choices[0].delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in parts) == arguments
    assert inside > 1


def test_round_trip(scripted_client: openai.OpenAI, scripted_http: httpx.Client) -> None:
    first = asking("call", tools=TOOLS)
    message: Any = scripted_client.chat.completions.create(**first).choices[0].message
    [call] = message.tool_calls
    history = [
        *first["messages"],
        message,
        {"role": "tool", "tool_call_id": call.id, "content": f"22 °C, {marker('done')}"},
    ]
    answer = scripted_client.chat.completions.create(
        model="scripted", messages=history, tools=TOOLS
    ).choices[0]
    assert answer.message.content == "It is sunny: 22 °C."
    sent = [*first["messages"], message.model_dump(), history[-1]]
    tokens = scripted_http.post("/tokenize", json={"messages": sent, "tools": TOOLS}).json()
    prompt = scripted_http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert "None" not in prompt
    assert prompt.count("# {") == 2
    # As the model wrote them, apart from how JSON may be written.
    written = prompt.split("<tool_call>get_weather ")[1].split("</tool_call><|im_end|>")[0]
    assert json.loads(written) == json.loads(ARGUMENTS)


def test_several_answers_with_calls(scripted_client: openai.OpenAI) -> None:
    choices = scripted_client.chat.completions.create(**asking("call", tools=TOOLS, n=2)).choices
    calls = [call for choice in choices for call in choice.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [ARGUMENTS] * 2  # type: ignore[union-attr]
    assert calls[0].id != calls[1].id
    with scripted_client.chat.completions.create(
        **asking("call", tools=TOOLS, n=2, stream=True)
    ) as stream:
        parts = [chunk.choices[0] for chunk in stream]
    for index in (0, 1):
        own = [part for part in parts if part.index == index]
        texts = [
            call.function.arguments
            for part in own
            for call in part.delta.tool_calls or ()
            if call.function is not None
        ]
        assert "".join(text or "" for text in texts) == ARGUMENTS
        assert [part.finish_reason for part in own if part.finish_reason] == ["tool_calls"]
