"""Deltas that come faster than they are sent: fewer chunks, the same answer, nothing held up."""

import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grout.request import Delta, SamplingParams
from grout.streams import merged
from scripts.bench_http_overhead import MadeUpEngine
from tests.server.fakes import FakeEngine, Live

CALL = ["<tool_call>", '\n{"name": "f", ', '"arguments": ', '{"x": "é"}', "}\n", "</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]


@dataclass
class Bursts(FakeEngine):
    """A `FakeEngine` whose consumer finds as many deltas as `sizes` says, one after another."""

    sizes: list[int] = field(default_factory=lambda: [1])

    async def _deltas(self, params: SamplingParams) -> AsyncIterator[Delta]:
        sizes = cycle(self.sizes)
        held: list[Delta] = []
        size = next(sizes)
        async for delta in super()._deltas(params):
            held.append(delta)
            if len(held) == size or delta.finish_reason is not None:
                yield merged(held)
                held, size = [], next(sizes)


@pytest.fixture(scope="module")
def live() -> Iterator[Live[Bursts]]:
    with Live(Bursts()) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: Live[Bursts]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60, trust_env=False) as client:
        yield client


def chunks_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in lines if line.startswith("{")]


def chat(http: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """The answers and the usage of a streamed chat, put together."""
    chunks = chunks_of(http, CHAT, {**body, "stream_options": {"include_usage": True}})
    answers: dict[int, dict[str, Any]] = {}
    for choice in [chunk["choices"][0] for chunk in chunks[:-1]]:
        answer = answers.setdefault(choice["index"], {"reasoning": "", "content": "", "calls": {}})
        answer["reasoning"] += choice["delta"].get("reasoning_content") or ""
        answer["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or []:
            known = answer["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
        answer.setdefault("logprobs", []).extend((choice["logprobs"] or {}).get("content") or [])
        answer["finish_reason"] = choice["finish_reason"]
    return [sorted(answers.items()), chunks[-1]["usage"]]


words = st.sampled_from(["a", "b ", "\n", "<", ">", "<think>", "</think>", "é\u2028", *CALL])
replies = st.lists(
    st.lists(words, max_size=4)
    | st.just(CALL)
    | st.lists(words, max_size=3).map(lambda inner: ["<think>", *inner, "</think>"]),
    max_size=4,
).map(lambda groups: [piece for group in groups for piece in group])
bodies = st.sampled_from(
    [
        {},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 1},
        {"tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS, "parallel_tool_calls": False, "n": 2, "logprobs": True},
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(replies, st.lists(st.integers(1, 9), min_size=1, max_size=4), bodies)
def test_a_chat_is_the_same(
    live: Live[Bursts], http: httpx.Client, reply: list[str], sizes: list[int], body: dict[str, Any]
) -> None:
    live.engine.reply = reply
    asked = body | {"messages": ASK}
    live.engine.sizes = [1]
    one_by_one = chat(http, asked)
    live.engine.sizes = sizes
    assert chat(http, asked) == one_by_one


@pytest.mark.parametrize("body", [{}, {"logprobs": 2}, {"n": 2}, {"prompt": ["x", "y"]}])
def test_a_completion_is_the_same(
    live: Live[Bursts], http: httpx.Client, body: dict[str, Any]
) -> None:
    asked = {"prompt": "x", "max_tokens": 100} | body
    live.engine.reply = ["a", "é", "<think>", "c", "d"] * 5
    live.engine.sizes = [1, 3, 7]
    plain = http.post("/v1/completions", json=asked).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in chunks_of(http, "/v1/completions", asked)]
    for choice in plain:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"] == live.engine.text
        assert [chunk["finish_reason"] for chunk in own[-2:]] == [None, "stop"]
        if choice["logprobs"] is not None:
            for key, values in choice["logprobs"].items():
                assert [v for c in own if c["logprobs"] for v in c["logprobs"][key]] == values


def test_a_response_is_the_same(live: Live[Bursts], http: httpx.Client) -> None:
    live.engine.reply = ["<think>", "a", "b", "</think>", "c", "d\u2028", "e"]
    live.engine.sizes = [2, 3]
    plain = http.post("/v1/responses", json={"input": "x"}).json()
    events = chunks_of(http, "/v1/responses", {"input": "x"})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert last["usage"] == plain["usage"]
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    contents = [item["content"] for item in last["output"]]
    assert contents == [item["content"] for item in plain["output"]]
    for kind, text in (("reasoning", "ab"), ("output", "cd\u2028e")):
        name = f"response.{kind}_text"
        deltas = [event["delta"] for event in events if event["type"] == f"{name}.delta"]
        assert "".join(deltas) == text
        assert [event["text"] for event in events if event["type"] == f"{name}.done"] == [text]


def test_fewer_chunks(live: Live[Bursts], http: httpx.Client) -> None:
    live.engine.reply = list("abcdefghij")
    for sizes, wanted in (([1], list("abcdefghij")), ([4], ["abcd", "efgh", "ij"])):
        live.engine.sizes = sizes
        chunks = chunks_of(http, CHAT, {"messages": ASK})
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert [content for content in contents if content] == wanted


def test_metrics_count_every_token(live: Live[Bursts], http: httpx.Client) -> None:
    def count(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"grout:{name}{{"))

    live.engine.reply = list("abcdefghij")
    live.engine.sizes = [1, 4]
    tokens = count("generation_tokens_total")
    gaps = count("inter_token_latency_seconds_count")
    http.post(CHAT, json={"messages": ASK})
    assert count("generation_tokens_total") == tokens + 11
    assert count("inter_token_latency_seconds_count") == gaps + 10


def test_a_client_that_does_not_read_holds_up_no_other() -> None:
    tokens = 3000
    body = {
        "messages": ASK,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    server = Live(MadeUpEngine(rate=50_000, streams=2))
    # What the kernel takes for a client is little, so that one need not read little.
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with server, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(60)
        lazy.connect(server._socket.getsockname())
        data = json.dumps(body).encode()
        lazy.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            other = http.post(CHAT, json=body).text
        answer = b""
        while block := lazy.recv(65536):
            answer += block
    for text in (other, answer.decode()):
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if line.startswith("data: {")
        ]
        pieces = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
        stamps = [float(stamp) for stamp in "".join(filter(None, pieces)).split()]
        assert stamps == sorted(stamps)
        assert len(stamps) == chunks[-1]["usage"]["completion_tokens"] == tokens
    # The last text that came held all that had not been read.
    assert len([piece for piece in pieces if piece]) < tokens / 2
