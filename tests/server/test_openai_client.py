"""The API as users of the `openai` package call it, on a real engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

import grout
from grout.errors import QueueFull
from grout.request import Delta, SamplingParams
from tests.server.fakes import MODEL, FakeEngine, Live, wait_for
from tests.server.scripted import marker
from tests.server.scripts import ALPHABET, ANSWER, ARGUMENTS, SCRIPTS, THOUGHT, asking

RESPONSE: dict[str, Any] = {"model": "scripted"}


class Weather(BaseModel):
    city: Literal["東京", "Zürich"]
    degrees: Literal[21, 22]
    sure: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["東京", "Zürich"]
    days: Literal[1, 2]


FLAT_TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
NO_THOUGHT = {"extra_body": {"enable_thinking": False}}


def test_sync(scripted_client: openai.OpenAI) -> None:
    answer = scripted_client.chat.completions.create(**asking("thought"))
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(SCRIPTS["thought"])
    assert answer.usage.completion_tokens_details is not None
    # All up to the tag that ends the thought.
    thinking = SCRIPTS["thought"].index("</think>") + 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == thinking


def test_raw_and_streaming_responses(scripted_client: openai.OpenAI) -> None:
    raw = scripted_client.chat.completions.with_raw_response.create(**asking("hi"))
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == "Hello, how are you?"
    with scripted_client.chat.completions.with_streaming_response.create(
        **asking("hi", stream=True)
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_async(scripted: Live[grout.Engine]) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{scripted.url}/v1",
            api_key="unused",
            max_retries=0,
            timeout=60,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:

            async def one(stream: bool) -> str:
                if not stream:
                    answer = await client.chat.completions.create(**asking("alphabet"))
                    return answer.choices[0].message.content or ""
                text = ""
                async with await client.chat.completions.create(
                    **asking("alphabet"), stream=True
                ) as chunks:
                    async for chunk in chunks:
                        text += chunk.choices[0].delta.content or ""
                return text

            # More than the engine runs at once.
            return await asyncio.gather(*(one(i % 2 == 0) for i in range(20)))

    assert asyncio.run(main()) == [ALPHABET] * 20


def test_three_answers_with_logprobs(scripted_client: openai.OpenAI) -> None:
    answer = scripted_client.chat.completions.create(
        **asking("emoji", n=3, logprobs=True, top_logprobs=3, seed=1)
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        raw = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
        assert raw.decode() == choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len(SCRIPTS["emoji"])


# The client's own, of a message that goes back as it came.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_parse(scripted_client: openai.OpenAI) -> None:
    for helper in (scripted_client.chat.completions, scripted_client.beta.chat.completions):
        choice = helper.parse(**asking("hi"), **NO_THOUGHT, response_format=Weather).choices[0]
        assert isinstance(choice.message.parsed, Weather)
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "") == choice.message.parsed.model_dump()
    messages = [*asking("hi")["messages"], choice.message, *asking("done")["messages"]]
    after = scripted_client.chat.completions.create(model="scripted", messages=messages)
    assert after.choices[0].message.content == "It is sunny: 22 °C."


def test_parse_of_what_is_cut_off(scripted_client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        scripted_client.chat.completions.parse(
            **asking("hi"), **NO_THOUGHT, response_format=Weather, max_completion_tokens=4
        )


def test_the_stream_helper(scripted_client: openai.OpenAI) -> None:
    with scripted_client.chat.completions.stream(
        **asking("hi", temperature=0), **NO_THOUGHT, response_format=Weather
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Weather)
    assert kinds.count("content.done") == 1
    assert kinds.count("content.delta") > 3


def test_tools_round_trip_with_the_helpers(scripted_client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    required = {"tools": [tool], "tool_choice": "required", "temperature": 0}
    messages: list[Any] = asking("hi")["messages"]
    parsed = scripted_client.chat.completions.parse(
        model="scripted", messages=messages, **required, **NO_THOUGHT
    )
    [call] = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with scripted_client.chat.completions.stream(
        model="scripted", messages=messages, **required, **NO_THOUGHT
    ) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls")]
        final = stream.get_final_completion().choices[0]
    done: Any = events[-1]
    assert done.type == "tool_calls.function.arguments.done"
    assert done.parsed_arguments == call.function.parsed_arguments
    assert final.finish_reason == "tool_calls"
    messages += [
        parsed.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": f"22 °C {marker('done')}"},
    ]
    answer = scripted_client.chat.completions.create(
        model="scripted", messages=messages, tools=[tool]
    )
    assert answer.choices[0].message.content == "It is sunny: 22 °C."


def test_completions(scripted_client: openai.OpenAI) -> None:
    answer = scripted_client.completions.create(
        model="scripted", prompt=["x" + marker("alphabet"), marker("hi")], n=2, echo=True, seed=1
    )
    assert [choice.text for choice in answer.choices] == [
        *["x<|alphabet|>" + ALPHABET] * 2,
        *["<|hi|>Hello, how are you?"] * 2,
    ]


def test_models_and_embeddings(scripted_client: openai.OpenAI) -> None:
    assert [model.id for model in scripted_client.models.list()] == ["scripted"]
    assert scripted_client.models.retrieve("scripted").owned_by == "grout"
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as caught:
        scripted_client.embeddings.create(model="scripted", input="x")
    assert (caught.value.code, caught.value.param) == ("unsupported_model", "model")
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' does not exist"):
        scripted_client.chat.completions.create(**asking("hi") | {"model": "gpt-4o"})


def test_responses(scripted_client: openai.OpenAI) -> None:
    answer = scripted_client.responses.create(**RESPONSE, input=marker("thought"))
    assert answer.output_text == ANSWER
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.status == "completed"
    with scripted_client.responses.create(
        **RESPONSE, input=marker("thought"), stream=True
    ) as stream:
        events: list[Any] = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert ("".join(thoughts), "".join(deltas)) == (THOUGHT, ANSWER)
    # Words that come while the server is busy come together.
    assert all(deltas) and all(thoughts)
    assert events[-1].response.usage == answer.usage
    cut = scripted_client.responses.create(
        **RESPONSE, input=marker("endless thought"), max_output_tokens=5
    )
    assert (cut.status, cut.output_text) == ("incomplete", "")


def test_responses_with_tools(scripted_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": marker("call")}]
    first = scripted_client.responses.create(**RESPONSE, input=history, tools=[FLAT_TOOL])
    [call] = first.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    with scripted_client.responses.create(
        **RESPONSE, input=history, tools=[FLAT_TOOL], stream=True
    ) as stream:
        events: list[Any] = list(stream)
    named = "response.function_call_arguments"
    deltas = [event.delta for event in events if event.type == f"{named}.delta"]
    [done] = [event for event in events if event.type == f"{named}.done"]
    assert "".join(deltas) == done.arguments == ARGUMENTS
    history += [
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": marker("done")},
    ]
    second = scripted_client.responses.create(**RESPONSE, input=history, tools=[FLAT_TOOL])
    assert second.output_text == "It is sunny: 22 °C."


def test_responses_parse(scripted_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        **RESPONSE,
        "input": marker("hi"),
        "text_format": Weather,
        "reasoning": {"effort": "none"},
    }
    assert isinstance(scripted_client.responses.parse(**options).output_parsed, Weather)
    with scripted_client.responses.stream(**options) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    assert "response.output_text.delta" in kinds


def test_what_responses_do_not_have(scripted_client: openai.OpenAI) -> None:
    first = scripted_client.responses.create(**RESPONSE, input=marker("hi"))
    for more in ({"previous_response_id": first.id}, {"conversation": "c"}, {"background": True}):
        [name] = more
        with pytest.raises(openai.BadRequestError, match=name) as caught:
            scripted_client.responses.create(**RESPONSE, input="x", **more)  # type: ignore[arg-type]
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        scripted_client.responses.retrieve(first.id)


class Busy(FakeEngine):
    """Full for the first requests."""

    def __init__(self, refusals: int, *, late: bool) -> None:
        super().__init__()
        self.refusals, self.late, self.times = refusals, late, list[float]()

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        self.times.append(time.monotonic())
        full = len(self.times) <= self.refusals
        if full and not self.late:
            raise QueueFull(9, 8)
        self.failure, self.fail_after = QueueFull(9, 8), 0 if full else None
        return super().generate(prompt_ids, params)


def patient(server: Live[Busy], retries: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        max_retries=retries,
        timeout=60,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_client_waits_and_tries_again(late: bool, stream: bool) -> None:
    engine = Busy(2, late=late)
    with Live(engine) as server, patient(server, 3) as client:
        if stream:
            with client.chat.completions.create(**ASK, stream=True) as chunks:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = client.chat.completions.create(**ASK).choices[0].message.content or ""
    assert text == engine.text
    assert len(engine.times) == 3
    # As long as Retry-After says, where the client's own first wait is half a second.
    assert all(b - a > 0.9 for a, b in zip(engine.times, engine.times[1:], strict=False))


def test_a_client_gives_up() -> None:
    with Live(Busy(9, late=False)) as server, patient(server, 1) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**ASK)
        assert caught.value.code == "queue_full"
        assert str(caught.value).lower().count("again") == 1
        assert caught.value.response.headers["retry-after"] == "1"
        assert len(server.engine.times) == 2


def test_a_client_that_waits_no_longer_frees_the_engine() -> None:
    engine = FakeEngine(delay=30)
    with (
        Live(engine) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="unused",
            max_retries=1,
            timeout=httpx.Timeout(30, read=0.3),
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
    ):
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**ASK)
        wait_for(lambda: engine.aborted == 2, seconds=30)
    assert engine.running == 0
