"""What a reply must match: `Grammar`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import llguidance

from grout.errors import GrammarError

WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the tokens of JSON: room for indentation, but no room to go on for ever."""

FORCED_BYTES = 4096
"""Most bytes that a grammar may begin with before there is a choice, besides those it is long."""

# Otherwise llguidance goes on by itself while only one byte may follow: in some grammars for ever.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of a reply, known to be well formed.

    Make one with the class methods; each raises `GrammarError` naming the place. kind: which of
    them. source: in llguidance's own form. name: what the caller knows it as, which makes it no
    other grammar.
    """

    kind: str
    source: str
    name: str = field(default="", compare=False)

    def named(self, name: str) -> "Grammar":
        """The same grammar as the caller knows it."""
        return replace(self, name=name)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> "Grammar":
        """JSON that a schema (draft 2020-12, as far as llguidance has it) accepts."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise GrammarError(f"the JSON schema is not JSON: {error}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise GrammarError(
                "the JSON schema must be an object, or true, not "
                + ("false" if schema is False else type(schema).__name__)
            )
        try:
            source = _schema_source(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema cannot be written as JSON: {error}") from None
        problem = _problem(source)
        if problem:
            raise GrammarError(f"the JSON schema at {_locate(schema, problem)}: {problem}")
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a pattern (syntax of Rust's regex crate, no look-around) matches as a whole."""
        if not isinstance(pattern, str):
            raise GrammarError(f"a regular expression is a text, not {type(pattern).__name__}")
        source = llguidance.LLMatcher.grammar_from_regex(pattern)
        return cls._checked("regex", source, f"the regular expression {pattern!r}")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of several texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) for t in texts):
            raise GrammarError("a choice is a list of at least one text")
        if "" in texts:
            raise GrammarError(f"choice {list(texts).index('')} is empty")
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        # A terminal: of the alternatives of a rule, llguidance follows 2000 at once.
        source = llguidance.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {options}")
        return cls._checked("choice", source, "the choice")

    @classmethod
    def lark(cls, text: str, *, ends: bool = False) -> "Grammar":
        """Text of a context-free grammar, in llguidance's variety of Lark, from rule `start`.

        One that begins with the same bytes without end is refused, too. ends: it is known that
        its text cannot be forced for ever, anywhere.
        """
        # What begins like JSON would be taken for llguidance's own form.
        if not isinstance(text, str) or text.lstrip()[:1] in ("", "{"):
            raise GrammarError("a grammar is a text with a rule named start")
        checked = cls._checked("lark", llguidance.LLMatcher.grammar_from_lark(text), "the grammar")
        if ends:
            return checked
        grammar = replace(checked, source=checked.source + _NO_FORCING)
        forced = _forced(grammar.source)
        if len(forced) > FORCED_BYTES + len(grammar.source):
            raise GrammarError(
                "the grammar has no end: it allows nothing but one text for "
                f"{len(forced)} bytes, which begins {forced[:16].decode(errors='replace')!r}"
            )
        return grammar

    @classmethod
    def _checked(cls, kind: str, source: str, what: str) -> "Grammar":
        problem = _problem(source)
        if problem:
            raise GrammarError(f"{what}: {problem}")
        return cls(kind, source)


def _schema_source(schema: object) -> str:
    text = json.dumps(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": WHITESPACE}
    )


def _problem(source: str) -> str:
    """What is wrong with a grammar, or ""."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source)
    return messages[0].strip() if failed else ""


def _forced(source: str) -> bytes:
    """The bytes a text has to begin with, up to one too many.

    Empty for a grammar that names a model's tokens.
    """
    matcher = llguidance.LLMatcher(_bytes(), source, log_level=0)
    forced, most = bytearray(), FORCED_BYTES + len(source)
    while len(forced) <= most and not matcher.is_stopped():
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        byte = allowed.bit_length() - 1
        if allowed.bit_count() != 1 or byte > 0xFF or not matcher.consume_token(byte):
            break
        forced.append(byte)
    return bytes(forced)


@cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _locate(schema: object, problem: str, path: str = "$") -> str:
    """The innermost part of a schema that has the same problem by itself."""
    for place, part in _parts(schema):
        if isinstance(part, Mapping) and _problem(_schema_source(part)) == problem:
            return _locate(part, problem, f"{path}.{place}")
    return path


def _parts(schema: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _SUBSCHEMAS:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"{key}.{name}", part) for name, part in schema[key].items())
    for key in _SCHEMA_LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}[{at}]", part) for at, part in enumerate(schema[key]))
    for key in _SCHEMAS:
        if key in schema:
            yield key, schema[key]


__all__ = ["Grammar"]
