"""Text of a real engine, token by token: characters, stop strings, log probabilities."""

import itertools
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grout
from tests.server.fakes import Live
from tests.server.scripted import marker
from tests.server.scripts import ALPHABET, BROKEN, EMOJI, MARKS, SCRIPTS, asking, script_text


def chat_stream(client: openai.OpenAI, name: str, **more: Any) -> list[Any]:
    """The choices of the chunks, one a chunk."""
    with client.chat.completions.create(**asking(name, stream=True, **more)) as stream:
        return [chunk.choices[0] for chunk in stream]


def replies(client: openai.OpenAI, name: str, **more: Any) -> list[tuple[list[str], str]]:
    """The reply's pieces and why it ended: chat and plain prompt, each streamed and whole."""
    chunks = chat_stream(client, name, **more)
    found = [([choice.delta.content or "" for choice in chunks], chunks[-1].finish_reason)]
    choice = client.chat.completions.create(**asking(name, **more)).choices[0]
    found.append(([choice.message.content or ""], choice.finish_reason))
    prompt: dict[str, Any] = {"model": "scripted", "prompt": marker(name), "max_tokens": 200}
    with client.completions.create(**prompt, stream=True, **more) as stream:
        texts = [chunk.choices[0] for chunk in stream]
    found.append(([choice.text for choice in texts], texts[-1].finish_reason))
    whole = client.completions.create(**prompt, **more).choices[0]
    return [*found, ([whole.text], whole.finish_reason)]


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("emoji", EMOJI, {}),
        ("emoji", EMOJI, {"temperature": 2, "stop": ["次!"]}),
        ("marks", MARKS, {"stop": ["z\u200d\u200d"]}),
    ],
    ids=["emoji", "emoji-held", "marks-held"],
)
def test_no_character_is_broken(
    scripted_client: openai.OpenAI, name: str, text: str, more: dict[str, Any]
) -> None:
    tokens = [piece for piece in SCRIPTS[name] if isinstance(piece, bytes)]
    cut = [token for token in tokens if "\ufffd" in token.decode(errors="replace")]
    assert len(cut) > len(tokens) / 2
    for pieces, reason in replies(scripted_client, name, **more):
        assert not any("\ufffd" in piece for piece in pieces)
        assert ("".join(pieces), reason) == (text, "stop")


def test_bytes_that_are_no_text_are_marked_and_the_rest_is_whole(
    scripted_client: openai.OpenAI,
) -> None:
    want = BROKEN.decode(errors="replace")
    assert want == "\ufffd ok \ufffd|\ufffd三 \ufffd fine"
    for pieces, reason in replies(scripted_client, "broken"):
        assert ("".join(pieces), reason) == (want, "stop")


def test_a_prompt_that_ends_inside_a_character(
    scripted: Live[grout.Engine], scripted_client: openai.OpenAI
) -> None:
    tokens = [token for token in SCRIPTS["emoji"] if isinstance(token, bytes)]
    size = next(i + 1 for i, token in enumerate(tokens) if b"\xf0" in token)
    front, rest = b"".join(tokens[:size]), b"".join(tokens[size:])
    assert front.startswith(b"repeat") and front.decode(errors="replace").endswith("\ufffd")
    by_bytes = {scripted.engine.tokenizer.token_bytes(i): i for i in range(550)}
    prompt: dict[str, Any] = {
        "model": "scripted",
        "prompt": [by_bytes[token] for token in tokens[:size]],
        "max_tokens": 50,
    }
    with scripted_client.completions.create(**prompt, stream=True) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == scripted_client.completions.create(**prompt).choices[0].text
    # New text alone, from the character on that the prompt has a part of.
    assert "".join(pieces) == "😀👩\u200d🚀 三次"
    assert rest.decode(errors="ignore") == "👩\u200d🚀 三次"
    assert next(piece for piece in pieces if piece)[0] == "😀"
    assert "\ufffd" not in "".join(pieces)
    echoed = scripted_client.completions.create(**prompt, echo=True, logprobs=0).choices[0]
    assert echoed.text == EMOJI
    found: Any = echoed.logprobs
    assert found.tokens == [token.decode(errors="backslashreplace") for token in tokens]
    assert found.text_offset == places(tokens)
    with scripted_client.completions.create(**prompt, echo=True, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == EMOJI
    prompt["max_tokens"] = 0
    assert scripted_client.completions.create(**prompt, echo=True).choices[0].text == "repeat "


def places(tokens: list[bytes]) -> list[int]:
    """For tokens of whole text: the character that each begins with, or goes on."""
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    ends = list(itertools.accumulate(len(c.encode()) for c in b"".join(tokens).decode()))
    return [sum(end <= start for end in ends) for start in starts]


def cuts(name: str) -> list[tuple[int, str]]:
    """Token limits that cut a script inside a character, with the text up to there."""
    tokens = [piece for piece in SCRIPTS[name] if isinstance(piece, bytes)]
    fronts = [b"".join(tokens[:size]) for size in range(1, len(tokens))]
    texts = [front.decode(errors="ignore") for front in fronts]
    return [
        (size, text)
        for size, (front, text) in enumerate(zip(fronts, texts, strict=True), 1)
        if len(text.encode()) < len(front)
    ]


@pytest.mark.parametrize(("size", "text"), cuts("emoji"))
def test_a_reply_cut_inside_a_character_ends_before_it(
    scripted_client: openai.OpenAI, size: int, text: str
) -> None:
    tokens = [piece for piece in SCRIPTS["emoji"] if isinstance(piece, bytes)][:size]
    chat = asking("emoji", max_tokens=size, logprobs=True)
    choice = scripted_client.chat.completions.create(**chat).choices[0]
    chunks = chat_stream(scripted_client, "emoji", max_tokens=size, logprobs=True)
    assert (choice.message.content, choice.finish_reason) == (text, "length")
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    # The bytes that are no text have their entries nevertheless.
    for found in ([choice], chunks):
        entries = [e for one in found if one.logprobs for e in one.logprobs.content or ()]
        assert [bytes(entry.bytes or ()) for entry in entries] == tokens
    plain: dict[str, Any] = {"model": "scripted", "prompt": marker("emoji"), "max_tokens": size}
    whole = scripted_client.completions.create(**plain, logprobs=0).choices[0]
    with scripted_client.completions.create(**plain, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.text == text
    shown: Any = whole.logprobs
    assert shown.tokens == [token.decode(errors="backslashreplace") for token in tokens]


def test_a_prompts_own_log_probabilities(scripted_client: openai.OpenAI) -> None:
    """A script as prompt: each of its tokens follows the one before for certain, or nearly."""
    asked: dict[str, Any] = {
        "model": "scripted",
        "prompt": f"{marker('alphabet')}\nA",
        "echo": True,
        "logprobs": 3,
    }
    for limit in (0, 1, 4):
        choice = scripted_client.completions.create(**asked, max_tokens=limit).choices[0]
        found: Any = choice.logprobs
        text = "".join(["BC", "D", "EFG", "HIJK"][:limit])
        assert (choice.text, choice.finish_reason) == (asked["prompt"] + text, "length")
        assert found.tokens == [marker("alphabet"), "\n", "A", *["BC", "D", "EFG", "HIJK"][:limit]]
        assert found.text_offset == [0, 12, 13, 14, 16, 17, 20][: 3 + limit]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        for token, value, top in list(
            zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
        )[1:]:
            # A newline after the marker is nothing that the model would say: it is one more.
            assert len(top) == (4 if token == "\n" else 3)
            assert value == top[token] == (min if token == "\n" else max)(top.values())
            assert token != "\n" or value < -1
        with scripted_client.completions.create(**asked, max_tokens=limit, stream=True) as stream:
            chunks: list[Any] = [chunk.choices[0] for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert chunks[0].text.startswith(asked["prompt"])
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
            assert [value for part in parts for value in part] == getattr(found, name)


def test_invalid_bytes_before_a_stop_string_leak_no_entry(scripted_client: openai.OpenAI) -> None:
    """In UTF-8 a U+FFFD takes more bytes than what it stands for."""
    answer = scripted_client.completions.create(
        model="scripted", prompt=marker("broken"), max_tokens=50, stop=[" \ufffd"], logprobs=0
    ).choices[0]
    found: Any = answer.logprobs
    assert answer.text == "\ufffd ok \ufffd|\ufffd三"[: len(answer.text)] == "\ufffd ok"
    assert found.tokens == ["\\xff", " ok \\xf0"]
    longer = scripted_client.completions.create(
        model="scripted", prompt=marker("broken"), max_tokens=50, stop=["三 \ufffd f"], logprobs=0
    ).choices[0]
    found = longer.logprobs
    assert longer.text == "\ufffd ok \ufffd|\ufffd"
    assert found.tokens == ["\\xff", " ok \\xf0", "\\x9f|\\xe4", "\\xb8\\xe4\\xb8"]
    assert found.text_offset == [0, 1, 5, 7]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 553)))
def test_any_tokens_detokenize(
    scripted: Live[grout.Engine], scripted_http: httpx.Client, tokens: list[int]
) -> None:
    raw = b"".join(map(scripted.engine.tokenizer.token_bytes, tokens))
    answer = scripted_http.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": raw.decode(errors="replace")}


@pytest.mark.parametrize(
    ("name", "stop", "want"),
    [
        # Over three tokens and a part of a fourth; inside one; with ends inside two.
        ("alphabet", "DEFGHIJ", "ABC"),
        ("alphabet", "F", "ABCDE"),
        ("alphabet", ["FGH"], "ABCDE"),
        ("alphabet", ["HIJK"], "ABCDEFG"),
        # The first token, a part of it and more than it; the last.
        ("alphabet", ["A"], ""),
        ("alphabet", ["AB"], ""),
        ("alphabet", ["Z"], ALPHABET[:-1]),
        # One the beginning of another, the first found but cut short, two that overlap.
        ("alphabet", ["DE", "DEF"], "ABC"),
        ("alphabet", ["DEF", "DE"], "ABC"),
        ("alphabet", ["CDX", "EFGHIJKLMNO!", "IJ"], "ABCDEFGH"),
        ("alphabet", ["CDEFG", "EF"], "ABCD"),
        ("emoji", "🚀", "repeat 😀👩\u200d"),
        ("emoji", ["\u200d"], "repeat 😀👩"),
        ("emoji", ["三次"], "repeat 😀👩\u200d🚀 "),
        ("marks", ["\r\n"], MARKS[: MARKS.index("\r")]),
        ("marks", ["\u0301"], MARKS[: MARKS.index("\u0301")]),
        ("broken", ["|"], "\ufffd ok \ufffd"),
    ],
)
def test_nothing_of_a_stop_string_is_sent(
    scripted_client: openai.OpenAI, name: str, stop: Any, want: str
) -> None:
    assert any(text in script_text(name) for text in ([stop] if isinstance(stop, str) else stop))
    for pieces, reason in replies(scripted_client, name, stop=stop):
        assert ("".join(pieces), reason) == (want, "stop")


def test_what_may_become_a_stop_string_is_sent_when_it_does_not(
    scripted_client: openai.OpenAI,
) -> None:
    chunks = chat_stream(scripted_client, "alphabet", stop=["CDEFGHIJ!", "YZ!"])
    sent = [choice.delta.content for choice in chunks if choice.delta.content]
    # "BC" is held from "C" on until "K" comes, and "YZ" until the end. What waits to be sent is
    # sent in one.
    held = ["A", "B", "CDEFGHIJK", "LM", "NOPQRSTUVWX", "YZ"]
    assert set(itertools.accumulate(sent)) <= set(itertools.accumulate(held))
    assert "".join(sent) == "".join(held)


def test_a_stop_string_in_the_reasoning(scripted_client: openai.OpenAI) -> None:
    choice = scripted_client.chat.completions.create(**asking("thought", stop=" see")).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert choice.message.reasoning_content == "Let me"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "n"), [("emoji", 2), ("marks", 1), ("thought", 1), ("broken", 2)])
def test_log_probabilities_have_the_real_bytes(
    scripted_client: openai.OpenAI, name: str, n: int
) -> None:
    options = asking(name, logprobs=True, top_logprobs=5, n=n)
    choices = scripted_client.chat.completions.create(**options).choices
    assert len(choices) == n
    tokens = [t.encode() if isinstance(t, str) else t for t in SCRIPTS[name][:-1]]
    for choice in choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert [bytes(entry.bytes or ()) for entry in entries] == tokens
        for entry in entries:
            assert len(entry.top_logprobs) == 5
            assert (entry.token, entry.bytes) == (
                entry.top_logprobs[0].token,
                entry.top_logprobs[0].bytes,
            )
            for one in (entry, *entry.top_logprobs):
                raw = bytes(one.bytes or ())
                assert one.token == raw.decode(errors="backslashreplace") != ""
                assert one.logprob <= 0
    streamed: dict[int, list[Any]] = {i: [] for i in range(n)}
    with scripted_client.chat.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            for part in chunk.choices:
                if part.logprobs is not None:
                    streamed[part.index] += part.logprobs.content or []
    for choice in choices:
        assert choice.logprobs is not None
        assert streamed[choice.index] == choice.logprobs.content


def test_log_probabilities_of_a_plain_prompt(scripted_client: openai.OpenAI) -> None:
    choice = scripted_client.completions.create(
        model="scripted", prompt=marker("emoji"), logprobs=5, max_tokens=50
    ).choices[0]
    found: Any = choice.logprobs
    want = [t.decode(errors="backslashreplace") for t in SCRIPTS["emoji"] if isinstance(t, bytes)]
    assert found.tokens == want
    assert {len(top) for top in found.top_logprobs} == {5}
    assert all(token in top for token, top in zip(want, found.top_logprobs, strict=True))
    assert found.text_offset[:4] == [0, 2, 4, 6]
    tokens = [token for token in SCRIPTS["emoji"] if isinstance(token, bytes)]
    assert found.text_offset == places(tokens)


@pytest.mark.parametrize(
    ("stop", "tokens"), [("DEFGHIJ", ["A", "BC"]), ("FGH", ["A", "BC", "D", "EFG"])]
)
def test_tokens_of_a_stop_string_have_no_log_probabilities(
    scripted_client: openai.OpenAI, stop: str, tokens: list[str]
) -> None:
    for chunks in (
        chat_stream(scripted_client, "alphabet", stop=stop, logprobs=True),
        scripted_client.chat.completions.create(
            **asking("alphabet", stop=stop, logprobs=True)
        ).choices,
    ):
        entries = [e for c in chunks if c.logprobs for e in c.logprobs.content or ()]
        assert [entry.token for entry in entries] == tokens
