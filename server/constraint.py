"""The grammar of an answer: what a request asked for, after any reasoning, or forced tool calls."""

import json
from typing import Any, Literal

from grout.errors import GrammarError
from grout.grammar import WHITESPACE, Grammar
from server.errors import invalid
from server.protocol import ServingTokenizer
from server.schemas.tools import Tool
from server.structured import Structure
from server.tool_choice import ToolUse

__all__ = ["Thinking", "constraint"]

Thinking = Literal["open", "possible", "off"]
"""Where an answer begins: inside the reasoning, perhaps before it, or after it."""


def constraint(
    structure: Structure | None, tools: ToolUse, thinking: Thinking, tokenizer: ServingTokenizer
) -> Grammar | None:
    """Return what the engine is to enforce; raises ApiError 400 naming the place."""
    tags = _Tags(tokenizer)
    if tools.mode == "required":
        return _checked(_reasoning(thinking, tags) + "body: calls\n" + _calls(tools, tags), tools)
    if structure is None:
        return None
    if tools.mode == "auto":
        rules = f"body: answer | calls\nanswer: {_body(structure)}\n" + _calls(tools, tags)
        return _checked(_reasoning(thinking, tags) + rules, tools, structure.param)
    if thinking == "off":
        return structure.grammar
    try:
        rules = _reasoning(thinking, tags) + f"body: {_body(structure)}\n"
        return Grammar.lark(rules).named(structure.param)
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
    if structure.kind == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if structure.kind == "regex":
        return _regex(value)
    return "%lark {\n" + str(value) + "\n}"


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


def _calls(tools: ToolUse, tags: _Tags) -> str:
    """The rules of one or more calls; `server.tool_parser` counts on exactly this form."""
    rules = ['calls: call ("\\n" call)*\n' if tools.parallel else "calls: call\n"]
    rules.append(f'call: {tags("<tool_call>")} "\\n{{" function "}}\\n" {tags("</tool_call>")}\n')
    names = " | ".join(f"function{i}" for i in range(len(tools.callable)))
    rules.append(f"function: {names}\n")
    for i, tool in enumerate(tools.callable):
        head = f'"name": {json.dumps(tool.function.name)}, "arguments": '
        rules.append(f"function{i}: {json.dumps(head)} arguments{i}\n")
        rules.append(f"arguments{i}: %json {_schema(_parameters(tool))}\n")
    return "".join(rules)


def _parameters(tool: Tool) -> dict[str, Any]:
    given = tool.function.parameters
    # Arguments are an object whatever the schema leaves open.
    return {"type": "object"} if not given else {"type": "object", **given}


def _checked(lark: str, tools: ToolUse, name: str = "tools") -> Grammar:
    """The grammar, or the 400 that names the tool whose parameters are no usable schema.

    name: the parameter that asks for more than the form of calls.
    """
    try:
        return Grammar.lark(lark).named(name)
    except GrammarError:
        pass
    for tool in tools.callable:
        try:
            Grammar.json_schema(_parameters(tool))
        except GrammarError as error:
            where = f"tools[{tools.shown.index(tool)}].function.parameters"
            raise invalid(where, f"Invalid '{where}': {error}.") from None
    raise invalid("tools", "These 'tools' cannot be made into a grammar.")
