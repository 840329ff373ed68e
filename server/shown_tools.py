"""Tools in the messages themselves, for chat templates that show a model none."""

import json
from collections.abc import Sequence
from typing import Any

from server.tool_parser import CLOSE, OPEN

__all__ = ["shown_in_messages"]


def shown_in_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages that say what a template with tools would: the tools, calls and their results.

    messages: flat ones. The tools, if any, stand at the end of the system message, which comes
    first.
    """
    shown = [_told(message) for message in messages]
    if not tools:
        return shown
    system = {"role": "system", "content": ""}
    if shown and shown[0]["role"] == "system":
        system = shown.pop(0)
    parts = [str(system["content"] or ""), _description(tools)]
    return [{**system, "content": "\n\n".join(filter(None, parts))}, *shown]


def _description(tools: Sequence[dict[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = json.dumps({"name": "NAME", "arguments": {"PARAMETER": "VALUE"}})
    return (
        f"These functions can be called:\n{functions}\n"
        f"A call is written as JSON between tags:\n{OPEN}\n{form}\n{CLOSE}"
    )


def _told(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call:\n{message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls
    ]
    content = "\n".join(filter(None, [message["content"], *written]))
    return {"role": "assistant", "content": content}
