"""Chat completions through the real OpenAI client."""

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest

from grout.request import SamplingParams
from tests.server.fakes import MODEL, FakeEngine, Live

ASK: list[Any] = [{"role": "user", "content": "Hi 你好 🙂"}]


def test_plain(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", engine.text)
    assert choice.finish_reason == "stop"
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.id)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.created > 1_600_000_000
    assert engine.prompt() == "<user>Hi 你好 🙂\n<assistant>"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>Hi 你好 🙂\n<assistant>".encode())
    assert answer.usage.completion_tokens == len(engine.reply) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(engine.reply) + 1


def test_stream_equals_plain(client: openai.OpenAI, engine: FakeEngine) -> None:
    with client.chat.completions.create(model=MODEL, messages=ASK, stream=True) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == engine.text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) == len(engine.reply) + 2
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks)


def test_stream_usage_is_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *rest, last = list(stream)
    plain = client.chat.completions.create(model=MODEL, messages=ASK)
    assert last.choices == []
    assert last.usage == plain.usage
    assert all(chunk.usage is None and chunk.choices for chunk in rest)


def test_raw_stream_has_one_line_an_event_and_ends_in_done(http: httpx.Client) -> None:
    body = {"messages": ASK, "stream": True}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    # str.splitlines breaks at U+2028, as careless clients do.
    assert all(len(event.splitlines()) == 1 for event in events[:-1])


def test_async_client_many_at_once(server: Live[FakeEngine]) -> None:
    server.engine.delay = 0.01

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="unused",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:

            async def one(stream: bool) -> str:
                if not stream:
                    answer = await client.chat.completions.create(model=MODEL, messages=ASK)
                    return answer.choices[0].message.content or ""
                text = ""
                async with await client.chat.completions.create(
                    model=MODEL, messages=ASK, stream=True
                ) as chunks:
                    async for chunk in chunks:
                        text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(16)))

    assert asyncio.run(main()) == [server.engine.text] * 16
    assert (server.engine.finished, server.engine.aborted) == (16, 0)


def test_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_messages_reach_the_template_flat(client: openai.OpenAI, engine: FakeEngine) -> None:
    earlier = client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}] * 2},
            earlier,  # type: ignore[list-item]  # as clients do it: with all its null fields
            {"role": "assistant", "content": None, "reasoning_content": "hm"},  # type: ignore[list-item]
            {"role": "system", "content": ""},
        ],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert engine.chat_template is not None
    assert engine.chat_template.seen == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": "a\na"},
        {"role": "assistant", "content": engine.text},
        {"role": "assistant", "reasoning_content": "hm", "content": ""},
        {"role": "system", "content": ""},
    ]
    assert engine.chat_template.kwargs == {"enable_thinking": False}


def test_sampling_of_the_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.default_sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=0,
        top_p=0.5,
        seed=-7,
        stop=["a", "b"],
        max_tokens=9,
        extra_body={"top_k": -1, "min_p": 0, "stop_token_ids": [3], "ignore_eos": True},
    )
    assert engine.requests[-1][1] == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.0,
        seed=-7,
        max_tokens=9,
        stop=("a", "b"),
        stop_token_ids=(3,),
        ignore_eos=True,
    )


def test_sampling_falls_back_to_the_model_then_to_openai(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.default_sampling = {"temperature": 0.6, "top_k": 20, "min_p": None}
    client.chat.completions.create(model=MODEL, messages=ASK, stop="x")
    prompt, params = engine.requests[-1]
    assert params == SamplingParams(
        temperature=0.6,
        top_p=1.0,
        top_k=20,
        min_p=0.0,
        stop=("x",),
        max_tokens=engine.max_model_len - len(prompt),
    )


def test_top_k_beyond_any_vocabulary(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": ASK, "top_k": 10**12}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[-1][1].top_k == 2**31 - 1


def test_harmless_and_neutral_parameters_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        n=1,
        logprobs=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        parallel_tool_calls=True,
        extra_body={"top_logprobs": None, "repetition_penalty": 1.0, "stream_options": None},
    )
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ending", "reply", "reasoning", "content"),
    [
        (
            "",
            ["<th", "ink>", "\n", "a <", "b", "\n", "\n", "</thi", "nk>", "\n\n", "c\n"],
            "a <b",
            "c\n",
        ),
        ("<think>\n", ["why", "</think>", "so"], "why", "so"),
        ("<think>\n", ["cut ", "off\n"], "cut off", ""),
        ("<think>\n\n</think>\n\n", ["\nplain ", "<think>"], None, "\nplain <think>"),
        ("", [" <thin", " ice"], None, " <thin ice"),
        ("", ["<thi"], None, "<thi"),
    ],
)
def test_reasoning_is_not_content(
    client: openai.OpenAI,
    engine: FakeEngine,
    stream: bool,
    ending: str,
    reply: list[str],
    reasoning: str | None,
    content: str,
) -> None:
    assert engine.chat_template is not None
    engine.chat_template.ending, engine.reply = ending, reply
    if stream:
        with client.chat.completions.create(model=MODEL, messages=ASK, stream=True) as chunks:
            deltas = [chunk.choices[0].delta for chunk in chunks]
        got_content = "".join(delta.content or "" for delta in deltas)
        got = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) or None
    else:
        message = client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message
        got_content = message.content or ""
        got = getattr(message, "reasoning_content", None)
        assert getattr(message, "reasoning", None) == got
    assert (got, got_content) == (reasoning, content)


@pytest.mark.parametrize(
    "messages",
    [
        [*ASK, {"role": "system", "content": "late"}],
        [{"role": "assistant", "content": "alone"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": ""}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}],
            }
        ],
    ],
)
def test_unusual_messages_are_answered(http: httpx.Client, messages: list[Any]) -> None:
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200


def test_no_character_is_ever_broken(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["😀", "👩\u200d🚀", " 三次", "\u2028", "é"]
    with client.chat.completions.create(model=MODEL, messages=ASK, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == engine.text
    assert "\ufffd" not in text
