"""Whatever JSON comes, the server answers, and never with a 5xx."""

import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.body import parse_json
from server.errors import ApiError
from server.reasoning import ReasoningSplitter
from server.schemas import ChatRequest, CompletionRequest
from tests.server.fakes import FakeEngine, Live

FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})
OTHERS = ["user", "suffix", "best_of", "functions"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**63, 10**30, 0.5, 1e308, -0.0]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec=None), max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
parts = st.fixed_dictionaries(
    {}, optional={"type": st.one_of(st.just("text"), values), "text": st.one_of(st.text(), values)}
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"])},
            optional={
                "content": st.one_of(st.text(max_size=20), st.lists(parts, max_size=3), values),
                "name": values,
                "tool_calls": values,
                "reasoning_content": values,
            },
        ),
        values,
    ),
    max_size=3,
)
bodies = st.one_of(
    values,
    st.dictionaries(st.sampled_from(FIELDS + OTHERS), values, max_size=6),
    st.fixed_dictionaries(
        {"messages": messages}, optional={name: values for name in FIELDS if name != "messages"}
    ),
    st.fixed_dictionaries(
        {"prompt": st.one_of(st.text(max_size=20), st.lists(st.integers(-2, 300)), values)},
        optional={name: values for name in FIELDS if name not in ("messages", "prompt")},
    ),
    st.fixed_dictionaries(
        {"messages": messages},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1),
            "top_k": st.integers(-1, 10**12),
            "max_tokens": st.integers(1, 600),
            "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
            "stream": st.booleans(),
            "chat_template_kwargs": st.dictionaries(st.text(max_size=5), values, max_size=3),
        },
    ),
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=bodies)
def test_bodies(http: httpx.Client, server: Live[FakeEngine], path: str, body: Any) -> None:
    raw = json.dumps(body).encode()
    response = http.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert isinstance(error["code"], str)
    assert server.engine.running == 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_parse_json_never_fails_otherwise(raw: bytes) -> None:
    try:
        value: object = parse_json(raw)
    except ApiError as error:
        value = error
    if isinstance(value, ApiError):
        assert (value.status, value.code) in ((400, "invalid_json"), (400, "invalid_unicode"))
    else:
        assert isinstance(value, dict)


PIECES = st.sampled_from(["<think>", "</think>", "\n", "a", "<", "th", "ink>", " ", "</", "é"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join), st.data(), st.booleans())
def test_reasoning_does_not_depend_on_how_text_is_cut(
    text: str, data: st.DataObject, opened: bool
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})

    def split(pieces: list[str]) -> dict[str, str]:
        splitter = ReasoningSplitter(opened=opened)
        found = {"reasoning": "", "content": ""}
        for piece in [piece for text in pieces for piece in splitter.feed(text)]:
            found[piece.kind] += piece.text
        for piece in splitter.flush():
            found[piece.kind] += piece.text
        return found

    whole = split([text])
    assert split([text[a:b] for a, b in itertools.pairwise(cuts)]) == whole
    begin = text.lstrip()
    if not opened and not begin.startswith("<think>"):
        assert whole == {"reasoning": "", "content": text}
        return
    rest = begin.removeprefix("<think>") if begin.startswith("<think>") else text
    thought, _, said = rest.partition("</think>")
    assert whole == {"reasoning": thought.strip("\n"), "content": said.lstrip("\n")}
