"""/v1/responses through the real OpenAI client."""

import itertools
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.fakes import MODEL, FakeEngine

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
TOOLS: list[Any] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
]


def test_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=40, temperature=0
    )
    assert answer.output_text == engine.text
    assert (answer.status, answer.object, answer.model) == ("completed", "response", MODEL)
    assert engine.prompt() == "<system>Be brief.\n<user>Hi\n<assistant>"
    assert engine.requests[-1][1].max_tokens == 40
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(engine.reply) + 1
    assert answer.usage.input_tokens_details.cached_tokens == 0


def test_reasoning_and_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply, engine.finish = ["<think>", "hm", "</think>", "so"], "length"
    answer = client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "low"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hm"  # type: ignore[union-attr,index]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[1].status == "incomplete"  # type: ignore[union-attr]


def test_events_come_in_order(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["<think>", "h", "m", "</think>", "a", "b\n", CALL]
    with client.responses.create(model=MODEL, input="Hi", tools=TOOLS, stream=True) as stream:
        events = list(stream)
    names = [name for name, _ in itertools.groupby(event.type for event in events)]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last: Any = events[-1]
    assert last.response.output_text == text == "ab"
    assert last.response.output[2].arguments == '{"a": "é"}'
    added: Any = [e for e in events if e.type == "response.output_item.added"]
    assert [e.item.status for e in added] == ["in_progress"] * 3
    assert [e.output_index for e in added] == [0, 1, 2]


def test_events_are_named_on_the_wire(http: httpx.Client) -> None:
    text = http.post("/v1/responses", json={"input": "Hi", "stream": True}).text
    assert text.startswith("event: response.created\ndata: {")
    assert "[DONE]" not in text


def test_the_stream_helper_and_parse(client: openai.OpenAI, engine: FakeEngine) -> None:
    class Answer(BaseModel):
        x: int

    engine.reply = ['{"x"', ": 3}"]
    parsed = client.responses.parse(model=MODEL, input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(x=3)
    assert engine.requests[-1][1].grammar is not None
    with client.responses.stream(model=MODEL, input="Hi", text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(x=3)


def test_tools_round_trip(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["<think>hm</think>", CALL]
    first = client.responses.create(model=MODEL, input="Hi", tools=TOOLS, tool_choice="required")
    call = first.output[-1]
    assert call.type == "function_call"
    engine.reply = ["done"]
    history: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    second = client.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert second.output_text == "done"
    assert engine.chat_template is not None
    assert engine.chat_template.seen == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": call.call_id,
                    "function": {"name": "f", "arguments": {"a": "é"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "42"},
    ]
    assert engine.chat_template.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer: Any = client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    entries = answer.output[0].content[0].logprobs
    assert bytes(b for entry in entries for b in entry.bytes) == engine.text.encode()
    assert {len(entry.top_logprobs) for entry in entries} == {2}


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (["<thi", "nk>\nhm", " text\n</thi", "nk>\n", "\ntext é", "<b>\n"], "text é<b>\n"),
        (["<think>hm</think>text", " text"], "text text"),
        (["text ", CALL[:20], CALL[20:], "\n", "more text", "<to"], "text|\nmore text<to"),
        ([CALL, "\n", "more text", "<to"], "more text<to"),
        (["\n text"], "\n text"),
        ([CALL], ""),
        (["<think>hm"], ""),
    ],
)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_logprobs_are_of_the_text(
    client: openai.OpenAI,
    engine: FakeEngine,
    reply: list[str],
    text: str,
    tools: list[Any],
    delay: float,
) -> None:
    """Each token is a byte. Merged deltas or not, streamed or not: the bytes of each text."""
    engine.reply, engine.delay = reply, delay
    if not tools and CALL[:5] in "".join(reply):
        text = "".join(reply)
    asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "include": [LOGPROBS], "tools": tools}

    def of(entries: Any) -> str:
        return bytes(byte for entry in entries for byte in entry.bytes).decode()

    def texts(output: Any) -> str:
        parts = [item.content[0] for item in output if item.type == "message"]
        assert all(of(part.logprobs) == part.text for part in parts)
        return "|".join(part.text for part in parts)

    assert texts(client.responses.create(**asked).output) == text
    with client.responses.create(**asked, stream=True) as stream:
        events: list[Any] = list(stream)
    for event in events:
        if event.type == "response.output_text.delta":
            assert of(event.logprobs) == event.delta
    assert texts(events[-1].response.output) == text


def test_failing_in_a_stream(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail_after = 2
    text = http.post("/v1/responses", json={"input": "Hi", "stream": True}).text
    assert "event: response.failed" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "max_tool_calls": 1}, "max_tool_calls"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "text": {"format": {"type": "banana"}}}, "text.format.type"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ],
)
def test_refusals(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
