"""Several answers, several prompts, echo, usage, log probabilities, and what `seed` means then."""

from codecs import utf_8_decode
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grout.detokenizer import Detokenizer
from grout.request import Delta, TokenLogprob
from server.logprobs import LogprobStream, Placed, legacy_logprobs, token_text
from tests.server.fakes import MODEL, FakeEngine, FakeTokenizer, wait_for

ASK: list[Any] = [{"role": "user", "content": "Hi"}]


def test_n(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=2**63 - 2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [engine.text] * 3
    assert [params.seed for _, params in engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert answer.usage is not None
    one = client.chat.completions.create(model=MODEL, messages=ASK).usage
    assert one is not None
    assert answer.usage.prompt_tokens == one.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.completion_tokens


def test_n_streamed(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.delay = 0.002
    with client.chat.completions.create(
        model=MODEL, messages=ASK, n=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, usage = list(stream)
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == engine.text
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["stop"]
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 2 * (len(engine.reply) + 1)
    # Both ran at once.
    order = [chunk.choices[0].index for chunk in chunks[2:]]
    assert order != sorted(order)


def test_leaving_aborts_every_answer(http: httpx.Client, engine: FakeEngine) -> None:
    engine.endless, engine.delay = True, 0.005
    body = {"messages": ASK, "n": 4, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        wait_for(lambda: engine.running == 4)
    wait_for(lambda: engine.running == 0)
    assert engine.aborted == 4


def test_one_failing_answer_fails_the_request(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail_after = 2
    response = http.post("/v1/chat/completions", json={"messages": ASK, "n": 3})
    assert response.status_code == 500
    assert engine.running == 0


@pytest.mark.parametrize("prompt", [["a", "b€"], [[97], [98, 226, 130, 172]]])
def test_several_prompts(client: openai.OpenAI, engine: FakeEngine, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, echo=True)
    texts = [choice.text for choice in answer.choices]
    assert texts == [front + engine.text for front in ("a", "a", "b€", "b€")]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    begins = 2 if isinstance(prompt[0], str) else 0
    assert answer.usage.prompt_tokens == 5 + begins
    with client.completions.create(
        model=MODEL, prompt=prompt, n=2, echo=True, stream=True
    ) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    for index, text in enumerate(texts):
        own = [choice for choice in chunks if choice.index == index]
        assert "".join(choice.text for choice in own) == text
        assert [bool(choice.finish_reason) for choice in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("max_tokens", [0, 1, 16])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs(
    client: openai.OpenAI, engine: FakeEngine, max_tokens: int, n: int
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["x€", [121, 256, 122]],
        "n": n,
        "echo": True,
        "logprobs": 2,
        "max_tokens": max_tokens,
    }
    answer = client.completions.create(**asked)
    assert {params.prompt_logprobs for _, params in engine.requests} == {2}
    fronts = [
        # The tokenizer's beginning of a text was not written.
        (["<|begin|>", "x", "\\xe2", "\\x82", "\\xac"], [0, 0, 1, 1, 1], "x€"),
        (["y", "<|begin|>", "z"], [0, 1, 1], "yz"),
    ]
    text = "".join(engine.reply[:max_tokens])
    assert len(answer.choices) == 2 * n
    for index, choice in enumerate(answer.choices):
        tokens, offsets, front = fronts[index // n]
        found: Any = choice.logprobs
        assert choice.text == front + text
        assert found.tokens[: len(tokens)] == tokens
        assert found.text_offset[: len(tokens)] == offsets
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert all(value < 0 for value in found.token_logprobs[1:])
        assert len(found.tokens) == len(tokens) + len(text.encode())
        begins = [len(front) + i for i, char in enumerate(text) for _ in char.encode()]
        assert found.text_offset[len(tokens) :] == begins
    with client.completions.create(**asked, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    for choice in answer.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        whole: Any = choice.logprobs
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(chunk.logprobs, name) for chunk in own if chunk.logprobs]
            assert [value for part in parts for value in part] == getattr(whole, name)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_no_answer(
    client: openai.OpenAI, engine: FakeEngine, http: httpx.Client, stream: bool
) -> None:
    body = {"prompt": "x€", "max_tokens": 0, "echo": True}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)
    for echo, want in ((True, "x€"), (False, "")):
        if stream:
            with client.completions.create(
                model=MODEL, prompt="x€", max_tokens=0, echo=echo, stream=True
            ) as chunks:
                found = [chunk.choices[0] for chunk in chunks]
        else:
            found = client.completions.create(
                model=MODEL, prompt="x€", max_tokens=0, echo=echo
            ).choices
        assert "".join(choice.text for choice in found) == want
        assert found[-1].finish_reason == "length"
    # All of the context, which leaves no room for an answer.
    assert http.post("/v1/completions", json={**body, "prompt": [1] * 512}).status_code == 200
    for changed in ({"prompt": [1] * 513}, {"prompt": [1] * 512, "max_tokens": 1}):
        error = http.post("/v1/completions", json={**body, **changed}).json()["error"]
        assert error["code"] == "context_length_exceeded"
    error = http.post("/v1/completions", json={**body, "min_tokens": 1}).json()["error"]
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        # 16 is the default of completions.
        ("/v1/completions", {"prompt": "xyz"}, 16),
        ("/v1/completions", {"prompt": "xyz", "max_tokens": 20}, 20),
        # What the context leaves: of 512 tokens.
        ("/v1/completions", {"prompt": [1] * 500}, 12),
        ("/v1/chat/completions", {"messages": ASK}, 512 - len("<user>Hi\n<assistant>")),
    ],
)
def test_min_tokens_beyond_the_limit(
    http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any], limit: int
) -> None:
    assert http.post(path, json=body | {"min_tokens": limit}).status_code == 200
    assert engine.requests[-1][1].min_tokens == limit
    response = http.post(path, json=body | {"min_tokens": limit + 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "min_tokens")
    assert str(limit) in error["message"] or "limit" in error["message"]


def test_too_many_answers(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["a"] * 200, "n": 2})
    assert response.json()["error"]["param"] == "n"


def test_cached_tokens(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.cached_tokens = 16
    answer = client.chat.completions.create(model=MODEL, messages=ASK, n=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_reasoning_tokens(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["<think>", "a", "b", "</think>", "c"]
    usage = client.chat.completions.create(model=MODEL, messages=ASK).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 4


def test_cut_off_while_thinking(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["<think>", "a ", "b ", "c ", "d ", "e "]
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=5)
    message = answer.choices[0].message
    assert message.content == ""
    assert getattr(message, "reasoning_content", None) == "a b c d "
    assert answer.choices[0].finish_reason == "length"


def test_all_sampling_parameters_arrive(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100, "256": 7},
        max_tokens=50,
        extra_body={"repetition_penalty": 1.2, "min_tokens": 3, "priority": -1},
    )
    params = engine.requests[-1][1]
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert dict(params.logit_bias) == {5: -100.0, 256: 7.0}
    assert (params.repetition_penalty, params.min_tokens, params.priority) == (1.2, 3, -1)
    assert params.logprobs is None


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
        ({}, {}),
    ],
)
def test_thinking_switches(
    http: httpx.Client, engine: FakeEngine, more: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert http.post("/v1/chat/completions", json={"messages": ASK, **more}).status_code == 200
    assert engine.chat_template is not None
    assert engine.chat_template.kwargs == variables


def test_chat_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "logprobs": True, "top_logprobs": 5}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert bytes(b for entry in entries for b in entry.bytes or ()) == engine.text.encode()
    assert all(entry.token and "\ufffd" not in entry.token for entry in entries)
    assert {len(entry.top_logprobs) for entry in entries} == {5}
    assert entries[0].token == "H"
    smile = next(e for e in entries if e.bytes == ["🙂".encode()[0]])
    assert smile.token == "\\xf0"
    with client.chat.completions.create(stream=True, **options) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    streamed = [e for c in chunks if c.logprobs for e in c.logprobs.content or ()]
    assert streamed == entries


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_the_token_itself_is_among_the_top_ones(client: openai.OpenAI, wanted: int) -> None:
    """Also where it is not among the likeliest, which is up to one more then."""
    entry = TokenLogprob(65, -3.0, ((66, -0.5), (67, -1.5)))
    assert legacy_logprobs(FakeTokenizer(), [Placed(0, 1, entry)], wanted, 0)["top_logprobs"] == [
        dict([("B", -0.5), ("C", -1.5)][:wanted]) | {"A": -3.0}
    ]
    found = client.completions.create(model=MODEL, prompt="x", logprobs=wanted).choices[0].logprobs
    assert found is not None and found.tokens is not None
    tops = found.top_logprobs or []
    assert len(tops) == len(found.tokens)
    assert all(top[token] == -0.5 for token, top in zip(found.tokens, tops, strict=True))
    # The fake's is its likeliest.
    assert {len(top) for top in tops} == {max(1, wanted)}


def test_completion_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    choice = client.completions.create(model=MODEL, prompt="x", logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(engine.text.encode())
    assert set(logprobs.token_logprobs or ()) == {-0.5}
    assert {len(top) for top in logprobs.top_logprobs or ()} == {2}
    ascii_tokens = [(t, o) for t, o in zip(logprobs.tokens, logprobs.text_offset, strict=True)]
    assert [t for t, o in ascii_tokens if len(t) == 1 and engine.text[o] != t] == []
    with client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True) as stream:
        parts = [c.choices[0].logprobs for c in stream if c.choices[0].logprobs]
    assert [o for part in parts for o in part.text_offset or ()] == logprobs.text_offset


def entry(raw: int) -> TokenLogprob:
    return TokenLogprob(raw, -1.0)


def test_logprobs_wait_for_their_text_and_stop_strings_have_none() -> None:
    stream = LogprobStream(FakeTokenizer())
    euro = "€".encode()
    assert stream.feed(Delta("", (euro[0],), None, (entry(euro[0]),))) == []
    assert stream.feed(Delta("", (euro[1],), None, (entry(euro[1]),))) == []
    settled = stream.feed(Delta("€", (euro[2],), None, (entry(euro[2]),)))
    assert [one.token_id for one in settled] == list(euro)
    assert stream.feed(Delta("", (65,), None, (entry(65),))) == []
    # The stop string "AB" is complete: neither of its tokens shows.
    assert stream.feed(Delta("", (66,), "stop", (entry(66),))) == []


def feed_all(parts: list[tuple[str, int]], end: str, begun: bytes = b"") -> list[tuple[int, int]]:
    """Places and ids of what a stream releases for texts and the byte that came with each."""
    stream, found = LogprobStream(FakeTokenizer(), begun), []
    for number, (text, raw) in enumerate(parts):
        reason: Any = end if number == len(parts) - 1 else None
        found += stream.placed(Delta(text, (raw,), reason, (entry(raw),)))
    return [(place, one.token_id) for place, _, one in found]


def test_bytes_that_are_no_text_count_as_they_are_shown() -> None:
    # U+FFFD is one character in three bytes of UTF-8; the stop string "AB" is cut off.
    parts = [("\ufffd", 0xFF), ("\ufffd", 0x80), ("", 65), ("", 66)]
    assert feed_all(parts, "stop") == [(0, 0xFF), (1, 0x80)]
    # A character that begins and is not gone on with, by text, by another one, by a stray byte.
    assert feed_all([("", 0xE4), ("\ufffdA", 65)], "length") == [(0, 0xE4), (1, 65)]
    assert feed_all([("", 0xE4), ("\ufffd", 0xC3), ("é", 0xA9)], "length") == [
        (0, 0xE4),
        (1, 0xC3),
        (1, 0xA9),
    ]
    assert feed_all([("", 0xF0), ("\ufffd\ufffd", 0xFF)], "length") == [(0, 0xF0), (1, 0xFF)]
    assert feed_all([("", 0xE4), ("\ufffd", 65), ("", 66)], "stop") == [(0, 0xE4)]


def test_half_a_character_at_the_end_has_its_entries() -> None:
    assert feed_all([("A", 65), ("", 0xF0), ("", 0x9F)], "length") == [
        (0, 65),
        (1, 0xF0),
        (1, 0x9F),
    ]


def test_a_character_that_the_prompt_has_begun() -> None:
    assert feed_all([("", 0x82), ("€", 0xAC), ("A", 65)], "length", b"\xe2") == [
        (0, 0x82),
        (0, 0xAC),
        (1, 65),
    ]
    assert feed_all([("\ufffdA", 65), ("B", 66)], "length", b"\xe2") == [(1, 65), (2, 66)]


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=8), st.data())
def test_places_are_those_of_the_text(pieces: list[bytes], data: st.DataObject) -> None:
    """A token that begins a character is where the text from it on begins, and so is its stop."""

    class Pieces(FakeTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return pieces[token]

    whole = b"".join(pieces).decode(errors="replace")
    stop = data.draw(st.sampled_from(whole)) if whole and data.draw(st.booleans()) else None
    tokens = Detokenizer(pieces.__getitem__, stops=[stop] if stop else [])
    stream, found, shown = LogprobStream(Pieces()), [], ""
    for number in range(len(pieces)):
        text = tokens.push(number)
        end = tokens.stopped or number == len(pieces) - 1
        if end and not tokens.stopped:
            text += tokens.flush()
        shown += text
        delta = Delta(text, (number,), "stop" if end else None, (entry(number),))
        found += stream.placed(delta)
        if end:
            break
    assert [one.token_id for _, _, one in found] == list(range(len(found)))
    limit = len(shown) if tokens.stopped else None
    for place, _, one in found:
        front = b"".join(pieces[: one.token_id])
        # What the bytes before it say once it has come: a character it goes on with is not said.
        before = utf_8_decode(front, "replace", False)[0]
        assert len(before) <= place <= len(before) + 1
        both = utf_8_decode(front + pieces[one.token_id][:1], "replace", False)[0]
        assert place <= max(len(both), len(before))
        assert limit is None or place < limit
    if not tokens.stopped:
        assert len(found) == len(pieces)


def test_an_end_of_sequence_has_no_entry() -> None:
    stream = LogprobStream(FakeTokenizer())
    assert stream.feed(Delta("", (256,), "stop", (entry(256),))) == []


def test_no_token_is_without_text() -> None:
    class Padded(FakeTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return b""

    assert token_text(Padded(), 7) == "token_id:7"


def test_tokenize_and_back(http: httpx.Client, engine: FakeEngine) -> None:
    out = http.post("/tokenize", json={"prompt": "é!", "return_token_strs": True}).json()
    assert out == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [256, 195, 169, 33],
        "token_strs": ["<|begin|>", "\\xc3", "\\xa9", "!"],
    }
    tokens = http.post("/tokenize", json={"prompt": "é!", "add_special_tokens": False}).json()
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "é!"}
    chat = http.post("/tokenize", json={"messages": ASK}).json()
    assert bytes(chat["tokens"]).decode() == "<user>Hi\n<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": ASK}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [257]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "x"}, "model"),
    ],
)
def test_tokenize_refuses(http: httpx.Client, path: str, body: Any, param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_any_bytes_detokenize(http: httpx.Client) -> None:
    tokens = [255, 200, 65, 0xF0, 0x9F, 128, 66]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "A" in text
    assert text.endswith("B")
