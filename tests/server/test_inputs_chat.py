"""Chats on a real engine: reasoning, roles and contents, several answers, usage, the context."""

from typing import Any

import httpx
import openai
import pytest

import grout
from tests.server.fakes import Live
from tests.server.scripted import CONTEXT, marker
from tests.server.scripts import ALPHABET, ANSWER, SCRIPTS, THOUGHT, asking

CHAT = "/v1/chat/completions"


def said(client: openai.OpenAI, name: str, **more: Any) -> tuple[str | None, str, str | None]:
    """Reasoning, content and finish reason, the same streamed and whole."""
    choice = client.chat.completions.create(**asking(name, **more)).choices[0]
    message: Any = choice.message
    reasoning = getattr(message, "reasoning_content", None)
    whole = (reasoning, message.content, choice.finish_reason)
    assert getattr(message, "reasoning", None) == reasoning
    with client.chat.completions.create(**asking(name, **more), stream=True) as stream:
        chunks: list[Any] = [chunk.choices[0] for chunk in stream]
    thoughts = [getattr(choice.delta, "reasoning_content", None) or "" for choice in chunks]
    contents = [choice.delta.content or "" for choice in chunks]
    assert all(
        not (thought and content) for thought, content in zip(thoughts, contents, strict=True)
    )
    assert chunks[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in chunks[:-1]] == [None] * (len(chunks) - 1)
    streamed = ("".join(thoughts) or None, "".join(contents), chunks[-1].finish_reason)
    assert streamed == whole
    return whole


def prompt_of(http: httpx.Client, messages: list[Any], **more: Any) -> str:
    """The text of a chat's prompt, as the model gets it."""
    tokens = http.post("/tokenize", json={"messages": messages, **more}).json()["tokens"]
    text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("name", "more", "want"),
    [
        ("thought", {}, (THOUGHT, ANSWER, "stop")),
        ("no thought", {}, (None, "Plain 三.", "stop")),
        ("split thought", {}, ("split", "and said", "stop")),
        ("late thought", {}, (None, "First <think>no</think> markup", "stop")),
        ("unfinished thought", {}, ("Then 三", "", "stop")),
        ("thought", {"max_completion_tokens": 5}, ("Let me ", "", "length")),
        ("endless thought", {"max_completion_tokens": 5}, ("and so o", "", "length")),
        ("endless thought", {"max_tokens": 1}, (None, "", "length")),
    ],
)
def test_reasoning(
    scripted_client: openai.OpenAI, name: str, more: dict[str, Any], want: tuple[str, str, str]
) -> None:
    assert said(scripted_client, name, **more) == want


@pytest.mark.parametrize(
    ("name", "more", "want"),
    [
        ("opened thought", {}, ("We see: 又", "Seen.", "stop")),
        ("opened thought", {"max_completion_tokens": 3}, ("We see", "", "length")),
        # Written once more, though the prompt has it.
        ("thought", {}, (THOUGHT, ANSWER, "stop")),
        ("unfinished thought", {}, ("Then 三", "", "stop")),
    ],
)
def test_a_prompt_that_opens_the_reasoning(
    scripted_client: openai.OpenAI, name: str, more: dict[str, Any], want: tuple[str, str, str]
) -> None:
    """As the templates of models that always think do."""
    opens = {"extra_body": {"chat_template_kwargs": {"begins_thinking": True}}}
    assert said(scripted_client, name, **opens, **more) == want


@pytest.mark.parametrize(
    "switch",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_turned_off(
    scripted_client: openai.OpenAI, scripted_http: httpx.Client, switch: dict[str, Any]
) -> None:
    want = (None, "Hello, how are you?", "stop")
    assert said(scripted_client, "hi", extra_body=switch) == want
    usage = scripted_client.chat.completions.create(**asking("hi"), extra_body=switch).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    thinking = scripted_client.chat.completions.create(**asking("hi")).usage
    assert thinking is not None
    # The empty think block is in the prompt: two tags and four newlines.
    assert usage.prompt_tokens == thinking.prompt_tokens + 6


def test_roles_and_contents_reach_the_prompt(scripted_http: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "一"}] * 2},
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": None},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"é":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "None of it"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": []},
    ]
    assert prompt_of(scripted_http, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n一\n一<|im_end|>\n"
        "<|im_start|>system\nlate<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>f {}</tool_call><tool_call>g {"é": 1}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n<|im_end|>\n"
        "<|im_start|>tool\nNone of it<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    answer = scripted_http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("messages", "content"),
    [
        # Parts in pieces that the marker is not whole in.
        ([{"role": "user", "content": [{"type": "text", "text": marker("hi")}] * 2}], "Hello, how"),
        ([{"role": "assistant", "content": marker("hi")}], "Hello, how"),
        (
            [{"role": "user", "content": marker("hi")}, {"role": "system", "content": "late"}],
            "Hello, how",
        ),
        ([{"role": "user", "content": "no script"}], ""),
        ([{"role": "user", "content": ""}], ""),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_unusual_conversations_are_answered(
    scripted_client: openai.OpenAI, messages: list[Any], content: str
) -> None:
    choice = scripted_client.chat.completions.create(model="scripted", messages=messages).choices[0]
    assert choice.message.content is not None
    assert choice.message.content.startswith(content)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("usage", [True, False, None])
def test_the_chunks_of_a_stream(scripted_client: openai.OpenAI, n: int, usage: bool | None) -> None:
    more = {} if usage is None else {"stream_options": {"include_usage": usage}}
    with scripted_client.chat.completions.create(
        **asking("alphabet", n=n, stream=True, **more)
    ) as stream:
        chunks = list(stream)
    if usage:
        last = chunks.pop()
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == n * len(SCRIPTS["alphabet"])
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    for index in range(n):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in own] == ["assistant", *[None] * (len(own) - 1)]
        assert "".join(choice.delta.content or "" for choice in own) == ALPHABET
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert len({chunk.choices[0].index for chunk in chunks}) == n


@pytest.mark.parametrize("usage", [True, False])
def test_the_end_of_a_stream_on_the_wire(scripted_http: httpx.Client, usage: bool) -> None:
    body = asking("hi", stream=True, stream_options={"include_usage": usage})
    *events, done, rest = scripted_http.post(CHAT, json=body).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert [event.startswith("data: {") for event in events] == [True] * len(events)
    assert ['"usage":{' in event for event in events] == [False] * (len(events) - 1) + [usage]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 40 * CONTEXT])
def test_prompts_at_the_end_of_the_context(
    scripted_http: httpx.Client, size: int, stream: bool
) -> None:
    plain = scripted_http.post("/v1/completions", json={"prompt": [65] * size, "stream": stream})
    # The template's own part of a chat is 19 tokens.
    ask = {"messages": [{"role": "user", "content": "x" * (size - 19)}], "stream": stream}
    chat = scripted_http.post(CHAT, json=ask)
    if size < CONTEXT:
        assert (plain.status_code, chat.status_code) == (200, 200)
        if not stream:
            counts = [answer.json()["usage"] for answer in (plain, chat)]
            assert [count["prompt_tokens"] for count in counts] == [size, size]
            assert [count["completion_tokens"] for count in counts] == [1, 1]
        return
    for answer, param in ((plain, "prompt"), (chat, "messages")):
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert str(CONTEXT) in error["message"]
        assert str(size) in error["message"] or "at least" in error["message"]
        if size <= CONTEXT + 1:
            assert str(size) in error["message"]


def test_answers_at_the_end_of_the_context(scripted_http: httpx.Client) -> None:
    marker_id, room = (
        scripted_http.post("/tokenize", json={"prompt": marker("loop")}).json()["tokens"],
        7,
    )
    prompt = [65] * (CONTEXT - room - 1) + marker_id
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0}
    for limit, status in ((room, 200), (room + 1, 400), (10**9, 400)):
        answer = scripted_http.post("/v1/completions", json={**body, "max_tokens": limit})
        assert answer.status_code == status
        if status == 400:
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            for number in (CONTEXT, CONTEXT - room, limit):
                assert str(number) in error["message"]
    unlimited = scripted_http.post("/v1/completions", json=body).json()
    assert unlimited["choices"][0]["finish_reason"] == "length"
    assert unlimited["usage"]["completion_tokens"] == room
    assert unlimited["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("size", [64, 128, 129, 190])
def test_the_same_prompt_twice(
    scripted: Live[grout.Engine], scripted_http: httpx.Client, size: int
) -> None:
    """Also where the prefix that both share is whole pages, and the marker lies in it."""
    [of_script] = scripted.engine.tokenizer.encode(marker("marks"))
    newline = scripted.engine.tokenizer.encode("\n")
    # Another first token for each size: nothing of it is cached yet.
    prompt = [size, of_script, *[66] * (size - 3), *newline]
    assert len(prompt) == size
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 60, "logprobs": 2}
    first, second, third = (
        scripted_http.post("/v1/completions", json=body).json() for _ in range(3)
    )
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached == [0, (size - 1) // 64 * 64]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["choices"][0]["text"].startswith("👨\u200d👩")
    assert second["choices"] == third["choices"]
    assert second["usage"] == third["usage"]
