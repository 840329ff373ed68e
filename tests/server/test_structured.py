"""Structured output: what reaches the engine, what is refused, and what the grammars accept."""

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

import grout
from grout.constraint import GrammarTokens
from server.constraint import Thinking, constraint
from server.schemas import ChatRequest, Function, Tool, parse_request
from server.structured import structure
from server.tool_choice import ToolUse, tool_use
from tests.server.fakes import MODEL, FakeEngine

llguidance = pytest.importorskip("llguidance")

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    name: str
    age: int


def test_the_parse_helper(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.reply = ["<think>x</think>\n\n", '{"name": "李', '雷", ', '"age": 7}']
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="李雷", age=7)
    assert engine.requests[-1][1].grammar is not None


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[ab]/c"}},
        {"structured_outputs": {"choice": ["yes", "nein/“no”"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "\\d+"},
        {"guided_choice": ["a"]},
        {"guided_grammar": "start: /x+/"},
        {"guided_grammar": 'root ::= "a" | [b-d]+'},
        {"grammar": 'root ::= "a" | [b-d]+'},
        {"structured_outputs": {"grammar": "root ::= x\nx ::= [0-9]"}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_grammars_reach_the_engine(
    http: httpx.Client, engine: FakeEngine, path: str, more: dict[str, Any]
) -> None:
    body = {"messages": ASK} if "chat" in path else {"prompt": "x"}
    assert http.post(path, json={**body, **more}).status_code == 200
    assert engine.requests[-1][1].grammar is not None


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_is_free(http: httpx.Client, engine: FakeEngine, value: Any) -> None:
    body = {"messages": ASK, "response_format": value, "structured_outputs": {"json": None}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[-1][1].grammar is None


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"properties": {"a": {"type": "banana"}}},
                    },
                }
            },
            "response_format.json_schema.schema",
            "properties.a",
        ),
        ({"response_format": {"type": "banana"}}, "response_format.type", "json_object"),
        ({"response_format": {}}, "response_format.type", "json_object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.schema",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": 3}},
            "response_format.json_schema",
            "object",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"bnf": "x"}}, "structured_outputs.bnf", "Unknown"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: nope"}, "guided_grammar", "nope"),
        ({"guided_grammar": "root ::= nope"}, "guided_grammar", "'nope', which is used at line 1"),
        ({"structured_outputs": {"grammar": 'x ::= "'}}, "structured_outputs.grammar", "'root'"),
        ({"grammar": "root ::= ("}, "grammar", "Expected ')' at line 1"),
        ({"grammar": "root ::= [a]", "guided_regex": "a"}, "grammar", "together"),
        ({"guided_grammar": "root ::= [z-a]"}, "guided_grammar", "range"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "together"),
    ],
)
def test_refusals_name_the_place(
    http: httpx.Client, more: dict[str, Any], param: str, says: str
) -> None:
    response = http.post("/v1/chat/completions", json={"messages": ASK, **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert http.post("/v1/chat/completions", json={"messages": ASK}).status_code == 200


class Tags:
    """Ids 0..255 are bytes; the markup of Qwen3 follows."""

    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    vocab_size = 256 + len(names)
    special_ids = frozenset({vocab_size - 1})

    def __init__(self, *, known: bool) -> None:
        self.known = known

    def token_to_id(self, text: str) -> int | None:
        return 256 + self.names.index(text) if self.known and text in self.names else None

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.names[token - 256].encode()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            tag = next((n for n in self.names if self.known and text.startswith(n)), None)
            ids += [256 + self.names.index(tag)] if tag else list(text[0].encode())
            text = text[len(tag or text[0]) :]
        return ids

    def min_tokens(self, text: str) -> int:
        raise NotImplementedError

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError


def accepts(grammar: grout.Grammar, tags: Tags, text: str) -> bool:
    class Vocabulary:
        def __init__(self) -> None:
            self.tokens = [tags.token_bytes(i) for i in range(tags.vocab_size)]
            self.eos_token_id = tags.vocab_size - 1
            self.special_token_ids = [self.eos_token_id]
            self.bos_token_id = None

        def __call__(self, data: bytes) -> list[int]:
            return list(data)

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))
    matcher = llguidance.LLMatcher(tokenizer, grammar.source, log_level=0)
    ids = tags.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FORCED = ToolUse(
    callable=(
        Tool(
            type="function",
            function=Function(
                name="f",
                parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            ),
        ),
        Tool(type="function", function=Function(name="g")),
    ),
    mode="required",
)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("thinking", "before"),
    [
        ("off", ""),
        ("possible", ""),
        ("possible", '<think>\n{"a": é\n</think>\n\n'),
        ("open", "\nhm</think>\n\n"),
    ],
)
def test_reasoning_comes_before_what_is_constrained(
    thinking: Thinking, before: str, known: bool
) -> None:
    tags = Tags(known=known)

    def made(tools: ToolUse | None = None, **more: Any) -> grout.Grammar:
        request = parse_request(ChatRequest, {"messages": ASK, **more})
        grammar = constraint(structure(request), tools or ToolUse(), thinking, tags)
        assert grammar is not None
        return grammar

    cases: list[tuple[grout.Grammar, list[str], list[str]]] = [
        (
            made(guided_json=SCHEMA),
            ['{"name": "x", "age": 3}', '{"name":"x","age":3}'],
            ["", "hi", '{"name": "x"}', '{"name": "x", "age": 3}{}'],
        ),
        (made(guided_regex="a/[0-9]+"), ["a/1", "a/12"], ["a/", "b", "a/1b"]),
        (made(guided_choice=["yes", "no/é"]), ["yes", "no/é"], ["ye", "no", "yesno/é"]),
        (
            made(guided_choice=[f"choice {i}" for i in range(2500)]),
            ["choice 2499", "choice 2"],
            ["choice 2500", "choice"],
        ),
        (made(guided_grammar='start: "a" x\nx: /[0-9]+/'), ["a1"], ["a", "1"]),
        (made(guided_grammar='# }\nroot ::= "a" x # {"\nx ::= [0-9]+'), ["a1"], ["a", "1"]),
        (
            made(FORCED),
            [CALL, f"{CALL}\n{CALL}", CALL.replace('"f"', '"g"')],
            ["hi", CALL[:-3], CALL.replace("1", '"x"'), CALL.replace('"f"', '"h"')],
        ),
    ]
    for grammar, good, bad in cases:
        assert [accepts(grammar, tags, before + text) for text in good] == [True] * len(good)
        assert [accepts(grammar, tags, before + text) for text in bad] == [False] * len(bad)
        if thinking == "open":
            assert not accepts(grammar, tags, good[0])
        if thinking == "off":
            assert not accepts(grammar, tags, f"<think></think>{good[0]}")


def test_tools_and_a_format_together() -> None:
    tags = Tags(known=True)
    tools = tool_use(list(FORCED.callable), "auto", parallel=None)
    request = parse_request(ChatRequest, {"messages": ASK, "guided_json": SCHEMA})
    grammar = constraint(structure(request), tools, "possible", tags)
    assert grammar is not None
    assert accepts(grammar, tags, CALL)
    assert accepts(grammar, tags, '<think>x</think>{"name": "x", "age": 3}')
    assert not accepts(grammar, tags, "hi")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize(
    ("thinking", "before"), [("off", ""), ("possible", ""), ("open", "a</think>")]
)
def test_a_grammar_that_goes_on_for_ever_does_so_step_by_step(
    thinking: Thinking, before: str, mode: str, known: bool
) -> None:
    tags = Tags(known=known)
    tools = tool_use(list(FORCED.callable), mode, parallel=None)
    endless = {"grammar": 'root ::= w " x"\nw ::= [ab] " "*\n'}
    request = parse_request(ChatRequest, {"messages": ASK, **endless})
    grammar = constraint(structure(request), tools, thinking, tags)
    assert grammar is not None
    engine_tokens: Any = tags
    state = GrammarTokens(engine_tokens, tags.vocab_size, [tags.vocab_size - 1]).constraint(grammar)
    for token in tags.encode(before + "b" + 30 * " "):
        state.accept(token)
    assert np.flatnonzero(np.unpackbits(state.allowed.view(np.uint8), bitorder="little")) == [32]


JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("source", "token", "more", "thinks"),
    [
        ("", None, {}, False),
        ("<think>", None, {}, True),
        ("", 5, {}, True),
        ("<think>", 5, {"enable_thinking": False}, False),
        ("<think>", 5, {"reasoning_effort": "none"}, False),
        ("<think>", 5, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("<think>", None, {"reasoning_effort": "low"}, True),
    ],
)
def test_only_what_thinks_may_think_before_it(
    http: httpx.Client,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    token: int | None,
    more: dict[str, Any],
    thinks: bool,
) -> None:
    assert engine.chat_template is not None
    engine.chat_template.source = source
    monkeypatch.setattr(
        engine.tokenizer, "token_to_id", lambda text: token if text == "<think>" else None
    )
    body = {"messages": ASK, **JSON, **more}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    grammar = engine.requests[-1][1].grammar
    assert grammar is not None
    assert (grammar.kind == "lark") == thinks


@pytest.mark.parametrize(
    "more",
    [{"guided_regex": "a"}, {"structured_outputs": {"choice": ["a"]}}, {"grammar": 'start: "a"'}],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_structure_and_a_forced_call(
    http: httpx.Client, more: dict[str, Any], choice: object
) -> None:
    tools = [{"type": "function", "function": {"name": "g"}}]
    body = {"messages": ASK, "tools": tools, "tool_choice": choice}
    response = http.post("/v1/chat/completions", json={**body, **more})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert error["param"].split(".")[0] in more
    assert error["param"] in error["message"]
    assert "'tool_choice'" in error["message"]
    # OpenAI's own is of the content, which such an answer has not.
    assert http.post("/v1/chat/completions", json={**body, **JSON}).status_code == 200
