"""Events made of a template are those made one by one, whatever text is in them."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.json_response import JsonResponse
from server.sse import NUMBER, TEXT, TextEvents, event

LINE_BREAKS = ("\r", "\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")

# Whatever UTF-8 carries.
texts = st.text(st.characters(codec="utf-8")) | st.text("".join(LINE_BREAKS) + '"\\a é')


def chunk(model: str, text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "created": 1, "model": model, "choices": [choice], "usage": None}


def numbered(item: str, text: str, number: object) -> dict[str, Any]:
    return {"item_id": item, "delta": text, "logprobs": [], "sequence_number": number, "last": item}


@given(texts, st.lists(texts, min_size=1))
@example("text", ["text", "number", "", "\\ud800text", '"', "\u2028"])
def test_a_text(model: str, given: list[str]) -> None:
    quick = TextEvents(chunk(model, TEXT))
    for text in given:
        assert quick(text) == event(chunk(model, text))


@given(texts, texts, st.integers(0, 10**9))
def test_a_text_and_a_number(item: str, text: str, number: int) -> None:
    name = "response.output_text.delta"
    quick = TextEvents(numbered(item, TEXT, NUMBER), name)
    assert quick(text, number) == event(numbered(item, text, number), name)


@given(texts)
def test_one_line_for_any_client(text: str) -> None:
    sent = TextEvents(chunk("m", TEXT))(text).decode()
    assert sent.endswith("\n\n")
    (line,) = sent[:-2].splitlines()
    assert json.loads(line.removeprefix("data: ")) == chunk("m", text)


def test_a_text_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="text"):
        TextEvents(chunk("m", "other"))


def test_a_lone_surrogate_ends_no_stream() -> None:
    """None should come this far; JSON has a way to write it."""
    for sent in (event({"text": "a\ud800"}), TextEvents({"text": TEXT})("a\ud800")):
        assert sent == b'data: {"text":"a\\ud800"}\n\n'
    assert JsonResponse({"text": "é\udfff"}).body == '{"text":"é\\udfff"}'.encode()
