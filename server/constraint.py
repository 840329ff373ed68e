"""The grammar of an answer: what a request asked for, after any reasoning, and tool calls."""

import json
from typing import Any, Literal

from grout.errors import GrammarError
from grout.grammar import WHITESPACE, Grammar
from server.errors import invalid
from server.protocol import ServingTokenizer
from server.schemas.tools import Tool
from server.structured import Structure
from server.tool_choice import ToolUse
from server.tool_parser import CLOSE, OPEN

__all__ = ["Thinking", "constraint"]

Thinking = Literal["open", "possible", "off"]
"""Where an answer begins: inside the reasoning, perhaps before it, or after it."""


def constraint(
    structure: Structure | None,
    tools: ToolUse,
    thinking: Thinking,
    tokenizer: ServingTokenizer,
    tool_param: str = "tools[{}].function",
) -> Grammar | None:
    """Return what the engine is to enforce; raises ApiError 400 naming the place.

    tool_param: what the client knows a tool's name and parameters as, by its number.
    """
    tags = _Tags(tokenizer)
    head = _reasoning(thinking, tags)
    if tools.mode == "required":
        calls = _Calls(tools, tags, tool_param)
        return calls.checked(head + "body: calls\n" + calls.alone())
    if structure is None:
        if not tools.guided:
            return None
        calls = _Calls(tools, tags, tool_param, strict_only=True)
        return calls.checked(head + calls.within_text(thinking))
    if tools.mode == "auto":
        calls = _Calls(tools, tags, tool_param)
        rules = f"body: answer | calls\nanswer: {_body(structure)}\n" + calls.alone()
        return calls.checked(head + rules, structure.param)
    if thinking == "off":
        return structure.grammar
    try:
        rules = f"{head}body: {_body(structure)}\n"
        return Grammar.lark(rules, ends=True).named(structure.param)
    except GrammarError as error:
        raise invalid(
            structure.param, f"Invalid '{structure.param}' after reasoning: {error}."
        ) from None


class _Tags:
    """Markup as a grammar has to have it: by id where the tokenizer has a token for it."""

    def __init__(self, tokenizer: ServingTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tag: str) -> str:
        token = self._tokenizer.token_to_id(tag)
        return json.dumps(tag) if token is None else f"<[{token}]>"


def _reasoning(thinking: Thinking, tags: _Tags) -> str:
    """The rules of an answer whose `body` comes after the reasoning."""
    close = tags("</think>")
    if close.startswith("<"):
        rest = f"rest: /(.|\\n)*/ {close}\n"
    else:
        rest = f"rest[stop={close}]: /(.|\\n)*/\n"
    start = {
        "open": "start: rest gap body",
        "possible": f"start: ({tags('<think>')} rest gap)? body",
        "off": "start: body",
    }[thinking]
    used = "" if thinking == "off" else rest + "gap: /[ \\t\\r\\n]*/\n"
    return f"{start}\n{used}"


def _body(structure: Structure) -> str:
    value = structure.value
    if structure.kind == "json":
        return f"%json {_schema(value)}"
    if structure.kind == "regex":
        return _regex(value)
    # Not the text that was given: this keeps llguidance from going on in it for ever.
    return "%lark {\n" + structure.grammar.source + "\n}"


def _schema(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {"not": {}} if not schema else {}
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _regex(pattern: str) -> str:
    """A pattern between slashes, those within escaped."""
    out, escaped = "", False
    for char in pattern:
        out += "\\/" if char == "/" and not escaped else {"\n": "\\n"}.get(char, char)
        escaped = char == "\\" and not escaped
    return f"/{out}/"


class _Calls:
    """The rules of tool calls; `server.tool_parser` counts on exactly this form.

    strict_only: only tools with `strict` have arguments as their parameters say.
    """

    def __init__(
        self, tools: ToolUse, tags: _Tags, param: str, *, strict_only: bool = False
    ) -> None:
        self._tools = tools
        self._tags = tags
        self._param = param
        self._schemas = [
            {"type": "object"} if strict_only and not tool.function.strict else _parameters(tool)
            for tool in tools.callable
        ]

    def alone(self) -> str:
        """`calls`: one or more, and nothing else."""
        call = f"{self._tags(OPEN)} call"
        more = f' ("\\n" {call})*' if self._tools.parallel else ""
        return f"calls: {call}{more}\n{self._call(self._tags(CLOSE))}"

    def within_text(self, thinking: Thinking) -> str:
        """`body`: any text, in which whatever begins like a call is one.

        Tags count as text here, since the model may also write them in pieces.
        """
        body = "(opened call)* text" if self._tools.parallel else "opened call | text"
        unless = ""
        if thinking == "possible" and self._tags("<think>").startswith('"'):
            # A text that begins the reasoning would be free text, too.
            unless = " & ~/<think>(.|\\n)*/"
        return (
            f"body: {body}\n"
            "opened[lazy]: OPENED\n"
            f"OPENED: /(.|\\n)*{OPEN}/{unless}\n"
            "text: TEXT\n"
            f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/{unless}\n"
            + self._call(json.dumps(CLOSE))
        )

    def _call(self, close: str) -> str:
        """`call`: what follows the opening tag, up to `close`."""
        names = " | ".join(f"function{i}" for i in range(len(self._schemas)))
        rules = [f'call: "\\n{{" function "}}\\n" {close}\n', f"function: {names}\n"]
        for i, (tool, schema) in enumerate(zip(self._tools.callable, self._schemas, strict=True)):
            head = f'"name": {json.dumps(tool.function.name)}, "arguments": '
            rules.append(f"function{i}: {json.dumps(head)} arguments{i}\n")
            rules.append(f"arguments{i}: %json {_schema(schema)}\n")
        return "".join(rules)

    def checked(self, lark: str, name: str = "tools") -> Grammar:
        """The grammar, or the 400 that names the tool whose parameters are no usable schema.

        name: the parameter that asks for more than the form of calls.
        """
        try:
            return Grammar.lark(lark, ends=True).named(name)
        except GrammarError:
            pass
        for tool, schema in zip(self._tools.callable, self._schemas, strict=True):
            try:
                Grammar.json_schema(schema)
            except GrammarError as error:
                where = f"{self._param.format(self._tools.shown.index(tool))}.parameters"
                raise invalid(where, f"Invalid '{where}': {error}.") from None
        raise invalid("tools", "These 'tools' cannot be made into a grammar.")


def _parameters(tool: Tool) -> dict[str, Any]:
    # Arguments are an object whatever the schema leaves open, or allows beside.
    return {**(tool.function.parameters or {}), "type": "object"}
