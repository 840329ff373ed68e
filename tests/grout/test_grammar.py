"""Grammars: what is refused and where, and which tokens they allow."""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from grout.constraint import Constraint, GrammarTokens
from grout.errors import GrammarError
from grout.grammar import Grammar
from models.tokenizer import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER = Tokenizer.byte_level(SPECIALS)
EOS = TOKENIZER.eos_token_ids[0]
# The model's vocabulary is larger than the tokenizer's, as it is with Qwen3.
VOCAB = 320
TOKENS = GrammarTokens(TOKENIZER, VOCAB, [EOS])


def allowed(constraint: Constraint) -> set[int]:
    bits = np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is, as a whole, one of the grammar's: each token is allowed before it."""
    constraint = TOKENS.constraint(grammar)
    for token in TOKENIZER.encode(text):
        if token not in allowed(constraint):
            return False
        constraint.accept(token)
    return constraint.complete or EOS in allowed(constraint)


SCHEMA = {
    "type": "object",
    "properties": {"名": {"type": "string"}, "n": {"type": "integer", "minimum": 3}},
    "required": ["名", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            Grammar.json_schema(SCHEMA),
            ['{"名":"中😀","n":12}', '{ "名": "",\n  "n": 3 }'],
            ['{"名":"a"}', '{"名":"a","n":2}', '{"n":3}', "[]"],
        ),
        (Grammar.json_schema(json.dumps(SCHEMA)), ['{"名":"a","n":3}'], ["{}"]),
        (Grammar.json_schema(True), ["1", "null", '[{"a":[]}]'], ["", "nul"]),
        (Grammar.json_object(), ["{}", '{"a": {"b": [1, 2.5e3, true]}}'], ["1", "[]", "{"]),
        (Grammar.regex(r"\d{3}-[a-c]+/x"), ["123-abc/x"], ["12-a/x", "123-d/x", "123-a/xy"]),
        (
            Grammar.choice([f"choice {i}" for i in range(5000)]),
            ["choice 4999", "choice 0", "choice 49"],
            ["choice 5x", "choice", "choice x"],
        ),
        (
            Grammar.choice(["yes", "yes, please", 'a "b"\n\\', "é😀"]),
            ["yes", "yes, please", 'a "b"\n\\', "é😀"],
            ["ye", "no", "yes,"],
        ),
        (
            Grammar.lark('start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/'),
            ["((42))", "7"],
            ["((4)", "()"],
        ),
        (Grammar.lark('start: "b"{4000} "c"'), ["b" * 4000 + "c"], ["b" * 4000]),
        # What a terminal takes is not left for what follows, for ever: but step by step.
        (Grammar.lark('start: W " x"\nW: /[ab]/ " "*'), [], ["a x", "a" + 50 * " "]),
    ],
)
def test_what_grammars_accept(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Grammar.json_schema({"type": "banana"}), r"at \$: Invalid type: banana"),
        (
            lambda: Grammar.json_schema(
                {"properties": {"a": {"anyOf": [{}, {"items": {"type": "banana"}}]}}}
            ),
            r"at \$\.properties\.a\.anyOf\[1\]\.items: Invalid type: banana",
        ),
        (lambda: Grammar.json_schema({"$ref": "#/$defs/x"}), r"/\$defs/x"),
        (lambda: Grammar.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (lambda: Grammar.json_schema("{"), "is not JSON: .* line 1 column 2"),
        (lambda: Grammar.json_schema("[1]"), "must be an object, or true, not list"),
        (lambda: Grammar.json_schema(False), "must be an object, or true, not false"),
        (lambda: Grammar.json_schema({"const": object()}), "cannot be written as JSON"),
        (lambda: Grammar.regex("("), r"regular expression '\(': .*unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.regex(3), "is a text, not int"),
        (lambda: Grammar.choice([]), "at least one text"),
        (lambda: Grammar.choice("ab"), "a list of at least one text"),
        (lambda: Grammar.choice(["a", ""]), "choice 1 is empty"),
        (lambda: Grammar.lark("start: foo"), r'at 1\(8\): unknown name: "foo"'),
        (lambda: Grammar.lark(" "), "rule named start"),
        (lambda: Grammar.lark('{"grammars": []}'), "rule named start"),
        (lambda: Grammar.lark('start: "a" start'), "no end: .* begins 'aaaaaaaaaaaaaaaa'"),
        (lambda: Grammar.lark('start: W " x"\nW: "a" " "*'), "no end: .* begins 'a  "),
    ],
)
def test_what_cannot_be_used_is_named(make: Callable[[], Grammar], place: str) -> None:
    with pytest.raises(GrammarError, match=re.compile(place, re.DOTALL)):
        make()


def test_equal_grammars_are_compiled_once() -> None:
    tokens = GrammarTokens(TOKENIZER, VOCAB, [EOS])
    first, second = (tokens.constraint(Grammar.regex("ab|ac")) for _ in range(2))
    assert len(tokens._compiled) == 1
    first.accept(*TOKENIZER.encode("a"))
    # The second is where it was.
    assert allowed(second) == set(TOKENIZER.encode("a"))
    assert allowed(first) == set(TOKENIZER.encode("bc"))
    for number in range(100):
        tokens.constraint(Grammar.regex(f"a{number}"))
    assert len(tokens._compiled) == 64


def test_control_tokens_are_no_text() -> None:
    constraint = TOKENS.constraint(Grammar.regex("(.|\n)+"))
    ids = {TOKENIZER.token_to_id(text) for text in SPECIALS}
    assert not allowed(constraint) & ids
    constraint.accept(*TOKENIZER.encode("x"))
    assert allowed(constraint) & ids == {EOS}
    assert max(allowed(constraint)) < TOKENIZER.vocab_size
    named = TOKENS.constraint(Grammar.lark('start: <|im_start|> "a"'))
    assert allowed(named) == {TOKENIZER.token_to_id("<|im_start|>")}


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    constraint = TOKENS.constraint(Grammar.regex("ab"))
    with pytest.raises(GrammarError, match="does not allow token"):
        constraint.accept(*TOKENIZER.encode("b"))
