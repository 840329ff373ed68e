"""`strict` where the model may call or not: text is free, and what begins as a call is valid."""

import json
from typing import Any

import httpx
import openai
import pytest

import grout
from server.constraint import Thinking, constraint
from server.schemas import Function, Tool
from server.tool_choice import tool_use
from tests.server.fakes import MODEL, FakeEngine
from tests.server.test_inputs_tools import TOOLS, answers, assert_valid
from tests.server.test_structured import Tags, accepts

INTEGER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = [
    Tool(type="function", function=Function(name=name, parameters=INTEGER, strict=strict))
    for name, strict in (("get", True), ("get_time", True), ("get_time_of", False))
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = call("get", '{"a": 1}')


def grammar(thinking: Thinking, tags: Tags, *, parallel: bool = True) -> grout.Grammar:
    made = constraint(None, tool_use(STRICT, "auto", parallel), thinking, tags)
    assert made is not None
    return made


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("thinking", "before"),
    [
        ("off", ""),
        ("possible", ""),
        ("possible", "<think>\n<tool_call>no</tool_call>\n</think>\n\n"),
        ("open", f"\nhm {call('nope', '')}</think>\n\n"),
    ],
)
def test_text_is_free_and_calls_are_valid(thinking: Thinking, before: str, known: bool) -> None:
    tags = Tags(known=known)
    made, single = (grammar(thinking, tags, parallel=parallel) for parallel in (True, False))
    texts = ["", "Hi! 2 < 3, </tool_call> <tool", "é\n\n", f"First {GOOD}", GOOD]
    for text in texts:
        assert accepts(made, tags, before + text)
        assert accepts(single, tags, before + text)
    several = [
        f"{GOOD}\n{GOOD}",
        "Both: " + call("get_time", '{"a": -2}') + f" and {GOOD} so",
        GOOD + call("get_time_of", '{"b": [{}], "a": "x"}') + GOOD,
        f"{GOOD} <tool",
    ]
    for text in several:
        assert accepts(made, tags, before + text)
        assert not accepts(single, tags, before + text)
    for text in (
        call("get", '{"a": "x"}'),
        call("get", "{}"),
        call("get_tim", '{"a": 1}'),
        call("get_time_of", "[1]"),
        call("nope", "{}"),
        "<tool_call>",
        f"so <tool_call> {GOOD}",
        f"{GOOD}\n{GOOD[:-4]}",
        f"{GOOD}<tool_call>x",
        "<tool_call>\n{}\n</tool_call>",
    ):
        assert not accepts(made, tags, before + text)
        assert not accepts(single, tags, before + text)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", [["object", "null"], ["array", "object"], "array"])
def test_arguments_are_an_object(choice: str, kind: object) -> None:
    """Anything else is no call, and would come as text."""
    tools = [
        Tool(type="function", function=Function(name="f", parameters={"type": kind}, strict=True))
    ]
    tags = Tags(known=True)
    made = constraint(None, tool_use(tools, choice, None), "off", tags)
    assert made is not None
    assert accepts(made, tags, call("f", '{"a": 1}'))
    for arguments in ("null", "[1]"):
        assert not accepts(made, tags, call("f", arguments))


def test_a_tag_in_pieces_is_one() -> None:
    class Pieces(Tags):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return list(text.encode())

    pieces = Pieces(known=True)
    made = grammar("off", Tags(known=True))
    assert accepts(made, pieces, "so <tool_cal")
    assert accepts(made, pieces, f"so {GOOD}\n{GOOD}")
    assert not accepts(made, pieces, "so <tool_call> what")


def test_without_strict_nothing_is_enforced(client: openai.OpenAI, engine: FakeEngine) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    create: Any = client.chat.completions.create
    for strict, enforced in ((None, False), (False, False), (True, True)):
        tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
        for choice in ("auto", None):
            create(**ask, tools=tools, tool_choice=choice)
            assert (engine.requests[-1][1].grammar is not None) == enforced
        create(**ask, tools=tools, tool_choice="none")
        assert engine.requests[-1][1].grammar is None
    assert engine.chat_template is not None
    create(**ask, tools=tools)
    assert engine.chat_template.tools == TOOLS


BAD = {"type": "object", "properties": {"a": {"type": "banana"}}}


def test_a_schema_that_cannot_be_enforced(http: httpx.Client, engine: FakeEngine) -> None:
    def ask(path: str, **bad: Any) -> httpx.Response:
        good = {"name": "f", "parameters": {"type": "object"}, "strict": True}
        bad = {"name": "g", "parameters": BAD, **bad}
        if path == "/v1/responses":
            tools = [{"type": "function", **one} for one in (good, bad)]
            return http.post(path, json={"input": "Hi", "tools": tools})
        tools = [{"type": "function", "function": one} for one in (good, bad)]
        ask = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        return http.post(path, json=ask)

    for path, param in (
        ("/v1/chat/completions", "tools[1].function.parameters"),
        ("/v1/responses", "tools[1].parameters"),
    ):
        response = ask(path, strict=True)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "$.properties.a" in error["message"]
        # One that is only described need not compile.
        assert ask(path).status_code == 200
        assert engine.requests[-1][1].grammar is not None


def strict(tools: list[Any]) -> list[Any]:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


@pytest.mark.parametrize("parallel", [True, False])
def test_what_the_model_writes(scripted_client: openai.OpenAI, parallel: bool) -> None:
    """It begins calls of its own accord, whose arguments its script has otherwise."""
    more: Any = {
        "tools": strict(TOOLS),
        "parallel_tool_calls": parallel,
        "max_completion_tokens": 120,
    }
    message, reason, deltas = answers(scripted_client, "call", **more)
    assert_valid(message.tool_calls[0])
    assert message.content is None
    # A grammar guides them, so that their arguments stream.
    assert len([delta for delta in deltas if delta.tool_calls]) > 3
    message, reason, _ = answers(scripted_client, "calls", **more)
    assert message.reasoning_content == "Two."
    # What comes of its second call, where it may have one, is not what its script has.
    assert message.content.startswith("Both: 三")
    assert parallel or (message.content, reason) == ("Both: 三", "tool_calls")
    assert_valid(message.tool_calls[0])
    for name, content in (("hi", "Hello, how are you?"), ("thought call", "no call")):
        message, reason, _ = answers(scripted_client, name, **more)
        assert (message.content, message.tool_calls, reason) == (content, None, "stop")


def test_responses(scripted_client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    answer = scripted_client.responses.create(
        model="scripted", input="Go on with <|call|>, please", tools=tools,
        parallel_tool_calls=False, temperature=0, max_output_tokens=120,
    )  # fmt: skip
    [item] = answer.output
    assert item.type == "function_call"
    assert item.name == "get_weather"
    assert json.loads(item.arguments).keys() == {"city", "注"}
