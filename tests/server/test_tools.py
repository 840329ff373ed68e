"""Tool calls through the real OpenAI client, and the parser under every way of cutting text."""

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.pieces import CallPiece, Piece
from server.tool_parser import ToolParser, parse_call
from tests.server.fakes import MODEL, FakeEngine
from tests.server.gate import Gate

ASK: list[Any] = [{"role": "user", "content": "Weather in 東京?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_time")
]
ARGUMENTS = '{"city": "東京", "nested": {"a": [1, 2.50, {"b": "</tool_call> \\"x\\""}]}}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def cut(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    """The plain answer's choice, after checking that the streamed one is the same."""
    plain = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, **more)
    choice = plain.choices[0]
    with client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, stream=True, **more
    ) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        if call.id:
            assert call.type == "function"
            calls[call.index] = {"name": call.function.name, "arguments": ""}
        calls[call.index]["arguments"] += call.function.arguments
    assert list(calls.values()) == [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or ()
    ]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == [choice.finish_reason]
    return choice


def test_a_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = cut(f"<think>\nhm\n</think>\n\n{CALL}")
    choice = ask(client)
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.function.arguments == ARGUMENTS
    assert json.loads(call.function.arguments)["city"] == "東京"
    assert call.id.startswith("call_")
    assert choice.message.content is None
    assert choice.message.reasoning_content == "hm"
    assert engine.chat_template is not None
    assert engine.chat_template.tools == TOOLS


def test_calls_after_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = cut(f"Let me see.\n{CALL}\n{OTHER}")
    choice = ask(client)
    assert choice.message.content == "Let me see."
    names = [call.function.name for call in choice.message.tool_calls]
    assert names == ["get_weather", "get_time"]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_one_call_at_most(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = cut(f"{CALL}\n{OTHER}")
    choice = ask(client, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert engine.running == 0
    assert engine.aborted == 2


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "f\\ud800", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": ["\\udfff"]}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"\\ud800": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1e999}"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": "x}}\n</tool_call> so',
        "Sure: <tool_call> is a tag",
        "a <tool_call",
        "<tool_call></tool_call>\n",
    ],
)
def test_what_does_not_parse_is_content(
    client: openai.OpenAI, engine: FakeEngine, text: str
) -> None:
    engine.reply = cut(text, 5)
    choice = ask(client)
    assert choice.message.content == text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("size", [12, 30, 60, len(CALL) - 3])
def test_ending_inside_a_call_invents_nothing(
    client: openai.OpenAI, engine: FakeEngine, finish: Any, size: int
) -> None:
    engine.reply, engine.finish = cut(CALL[:size]), finish
    choice = ask(client)
    assert choice.message.content == CALL[:size]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == finish


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_time"}}],
)
def test_forced_calls_have_a_grammar(
    client: openai.OpenAI, engine: FakeEngine, choice: Any
) -> None:
    engine.reply = cut(OTHER)
    answer = ask(client, tool_choice=choice)
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].function.name == "get_time"
    grammar = engine.requests[-1][1].grammar
    assert grammar is not None
    assert ("get_weather" in grammar.source) == (choice == "required")


def test_arguments_of_forced_calls_stream(
    client: openai.OpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is of them comes before the rest has been generated."""
    engine.reply = cut(f"{CALL}\n{OTHER}")
    start, seen = '{"city": "東京",', ["", ""]
    with monkeypatch.context() as patch:
        gate = Gate(engine, patch)
        gate.open(CALL.index(start) // 3 + len(start) // 3 + 1)
        with client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", stream=True
        ) as stream:
            calls = (c for chunk in stream for c in chunk.choices[0].delta.tool_calls or ())
            for call in calls:
                seen[call.index] += call.function.arguments
                if seen[0].startswith(start):
                    break
            assert engine.running == 1
            gate.open(len(engine.reply))
            for call in calls:
                seen[call.index] += call.function.arguments
    assert seen == [ARGUMENTS, "{}"]
    assert ask(client, tool_choice="required").message.tool_calls[0].function.arguments == ARGUMENTS


def test_a_forced_call_cut_off(client: openai.OpenAI, engine: FakeEngine) -> None:
    cut_off = CALL.index("nested")
    engine.reply, engine.finish = cut(CALL[:cut_off]), "length"
    choice = ask(client, tool_choice="required")
    assert choice.message.tool_calls[0].function.arguments == '{"city": "東京", "'
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("stop", ["city", '"nested', "</tool_call>", "\n</tool_call>"])
def test_a_forced_call_that_a_stop_cuts_is_no_call_to_be_made(
    client: openai.OpenAI, engine: FakeEngine, stop: str
) -> None:
    engine.reply = cut(CALL[: CALL.rindex(stop)])  # as the engine cuts it, with "stop"
    choice = ask(client, tool_choice="required")
    [call] = choice.message.tool_calls
    assert call.function.arguments == ARGUMENTS[: len(call.function.arguments)]
    whole = call.function.arguments == ARGUMENTS
    assert whole == stop.endswith("</tool_call>")
    assert choice.finish_reason == ("tool_calls" if whole else "stop")
    engine.reply = cut(f"{CALL}\n{CALL[: CALL.rindex(stop)]}")
    choice = ask(client, tool_choice="required")
    assert len(choice.message.tool_calls) == 2
    assert choice.finish_reason == ("tool_calls" if whole else "stop")


def test_no_tools_no_calls(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = [CALL]
    choice = ask(client, tool_choice="none")
    assert choice.message.content == CALL
    assert choice.finish_reason == "stop"
    assert engine.chat_template is not None
    assert engine.chat_template.tools is None
    plain = client.chat.completions.create(model=MODEL, messages=ASK)
    assert plain.choices[0].message.content == CALL


@pytest.mark.parametrize("choice", ["auto", "none", None])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_template_without_tools(
    http: httpx.Client, engine: FakeEngine, choice: str | None, system: list[dict[str, str]]
) -> None:
    """The system message has them, if any; earlier calls are told in each case."""
    assert engine.chat_template is not None
    engine.chat_template.source, engine.max_model_len = "{{ messages }}", 4096
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    talk = [
        *system,
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    body: dict[str, Any] = {"messages": talk, "tools": TOOLS, "tool_choice": choice}
    if choice is None:
        body = {"messages": talk}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    seen = engine.chat_template.seen
    if choice == "auto":
        told = seen[0]["content"]
        assert told.startswith("Be brief.\n\n" if system else "These functions")
        for tool in TOOLS:
            assert f'"name": "{tool["function"]["name"]}"' in told
        seen = seen[1:]
    else:
        assert seen[: len(system)] == system
        seen = seen[len(system) :]
    assert [message["role"] for message in seen] == ["user", "assistant", "user"]
    assert seen[1]["content"] == (
        '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    )
    assert seen[2]["content"] == "Result of the call:\n42"


def test_round_trip(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = [CALL]
    message = (
        client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS).choices[0].message
    )
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    engine.reply = ["Sunny."]
    client.chat.completions.create(
        model=MODEL,
        messages=[
            *ASK,
            message,  # type: ignore[list-item]  # as clients do it: with content None
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "☀"}]},
            {"role": "tool", "tool_call_id": "b", "content": "22 °C"},
        ],
        tools=TOOLS,
    )
    assert engine.chat_template is not None
    assert "None" not in engine.prompt()
    _, assistant, *results = engine.chat_template.seen
    assert assistant["content"] == ""
    assert assistant["tool_calls"] == [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": "get_weather", "arguments": json.loads(ARGUMENTS)},
        }
    ]
    assert results == [
        {"role": "tool", "tool_call_id": call.id, "content": "☀"},
        {"role": "tool", "tool_call_id": "b", "content": "22 °C"},
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    TOOLS[0],
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"type": "banana"}}},
                        },
                    },
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
    ],
)
def test_refusals(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": ASK, **more})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {}}', ("f", "{}")),
        ('\n { "arguments" : {"a":  1.50} , "name":"f" }\n', ("f", '{"a":  1.50}')),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": "text"}', None),
        ('{"name": "f", "arguments": {}} x', None),
        ('{"name": "f", "name": "g", "arguments": {}}', None),
        ("[" * 5000, None),
        ('{"name": "\\ud83d\\ude42", "arguments": {}}', ("🙂", "{}")),
        ("", None),
    ],
)
def test_parse_call(text: str, call: tuple[str, str] | None) -> None:
    found = parse_call(text)
    assert (None if found is None else (found.name, found.arguments)) == call


FRAGMENTS = st.sampled_from(
    [CALL, OTHER, "<tool_call>", "</tool_call>", "\n", " ", "<", "tool", "é", "x", '"', "{", "}"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=7).map("".join), st.data(), st.booleans())
def test_calls_do_not_depend_on_how_text_is_cut(
    text: str, data: st.DataObject, guided: bool
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})

    def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        parser = ToolParser(guided=guided)
        content, calls = "", []
        for piece in [p for text in pieces for p in parser.feed(text)] + parser.flush():
            if isinstance(piece, Piece):
                content += piece.text
            elif isinstance(piece, CallPiece) and piece.name is not None:
                calls.append((piece.name, piece.arguments))
            else:
                calls[piece.index] = (
                    calls[piece.index][0],
                    calls[piece.index][1] + piece.arguments,
                )
        return content, calls

    whole = parse([text])
    assert parse([text[a:b] for a, b in itertools.pairwise(cuts)]) == whole
    if not whole[1]:
        assert whole[0] == text
