"""Grammars of a client that lead nowhere, and whose fault that is said to be."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

import grout
from tests.server.fakes import Live
from tests.server.scripted import marker
from tests.server.scripts import EMOJI, SCRIPTS, asking

AT_ONCE = [
    ({"guided_grammar": 'start: "a" x\nx: x "b"'}, "guided_grammar"),
    ({"structured_outputs": {"grammar": 'start: "a" x\nx: x "b"'}}, "structured_outputs.grammar"),
]
PROMPT: dict[str, Any] = {"prompt": marker("hi"), "max_tokens": 20}
LATER = {"guided_grammar": 'start: "a" "b" /[0-4]/ /[5-9]/ x\nx: x "c"'}


def refusal(response: httpx.Response) -> Any:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_value"
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "param"), AT_ONCE)
def test_a_grammar_that_leads_nowhere(
    scripted: Live[grout.Engine],
    scripted_http: httpx.Client,
    scripted_client: openai.OpenAI,
    more: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    before = scripted.engine.stats()

    def beside(_: int) -> str:
        return (
            scripted_client.completions.create(
                model="scripted", prompt=marker("emoji"), max_tokens=len(SCRIPTS["emoji"])
            )
            .choices[0]
            .text
        )

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(beside, i) for i in range(3)]
        response = scripted_http.post("/v1/completions", json={**PROMPT, **more, "stream": stream})
        assert [other.result() for other in others] == [EMOJI] * 3
    error = refusal(response)
    assert error["param"] == param
    assert error["message"].startswith(f"Invalid '{param}': the grammar leads nowhere at token 1")
    assert "after 'a'" in error["message"]
    after = scripted.engine.stats()
    assert after["requests_failed"] == before["requests_failed"] + 1
    assert after["pages_free"] == after["pages_total"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"grammar": 'root ::= w " x"\nw ::= "a" " "*\n'}, "grammar"),
        ({"guided_grammar": 'start: W " x"\nW: "a" " "*\n'}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar"),
        (
            {"guided_grammar": 'start: W " x"\nW: "a" " "*\n%llguidance {"no_forcing": false}'},
            "guided_grammar",
        ),
        ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs.grammar"),
    ],
)
def test_a_grammar_without_end(
    scripted_http: httpx.Client, path: str, more: dict[str, Any], param: str
) -> None:
    body = {"prompt": marker("hi")} if path == "completions" else asking("hi")
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(scripted_http.post, "/v1/chat/completions", json=asking("hi"))
        error = refusal(scripted_http.post(f"/v1/{path}", json={**body, "max_tokens": 20, **more}))
        assert beside.result().status_code == 200
    assert error["param"] == param
    assert error["message"].startswith(f"Invalid '{param}': the grammar has no end")


def test_no_end_after_a_choice_takes_no_more_than_its_tokens(
    scripted_http: httpx.Client,
) -> None:
    body = {**PROMPT, "grammar": 'root ::= w " x"\nw ::= [ab] " "*\n'}
    choice = scripted_http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"][0] in "ab"
    assert (choice["text"][1:], choice["finish_reason"]) == (" " * 19, "length")


def test_in_the_middle_of_a_stream(scripted_http: httpx.Client) -> None:
    whole = refusal(scripted_http.post("/v1/completions", json={**PROMPT, **LATER}))
    response = scripted_http.post("/v1/completions", json={**PROMPT, **LATER, "stream": True})
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)[:2] == "ab"
    assert last == {"error": whole}
    assert whole["param"] == "guided_grammar"
    assert "no text can follow" in whole["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_chat_that_may_think_first(scripted_http: httpx.Client, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": marker("hi")}],
        "guided_grammar": 'start: "a" x\nx: x "b"',
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": stream,
    }
    error = refusal(scripted_http.post("/v1/chat/completions", json=body))
    assert error["param"] == "guided_grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        # Found out when it is put together with the model's tokens, before any is generated.
        ({"guided_grammar": 'start: x\nx: x "b"'}, "guided_grammar"),
        ({"guided_grammar": "start: <|nothing|>"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "start: <|no|>"}}, "structured_outputs.grammar"),
    ],
)
def test_what_the_engine_refuses_is_named(
    scripted_http: httpx.Client, more: dict[str, Any], param: str, stream: bool
) -> None:
    error = refusal(
        scripted_http.post("/v1/completions", json={**PROMPT, **more, "stream": stream})
    )
    assert error["param"] == param
    assert error["message"].startswith(f"Invalid '{param}': ")
