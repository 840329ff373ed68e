"""Input items of /v1/responses to chat messages."""

from typing import Any

from server.errors import ApiError, invalid
from server.paths import join_path

__all__ = ["messages_of"]

Path = tuple[str | int, ...]

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("assistant", "developer", "system", "user")


def messages_of(given: str | list[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Return flat chat messages; raises ApiError 400 naming the item at fault.

    A turn of the assistant is one message, however many items (reasoning, text, calls) it has.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise invalid("input", "'input' is empty; send at least one item.")
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise _wrong(("input", i), "send an object")
        _add(messages, item, ("input", i))
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], path: Path) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, path)
    elif kind == "function_call":
        turn = _assistant(messages)
        turn.setdefault("tool_calls", []).append(_call(item, path))
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _string(item, "call_id", path),
                "content": _text(item.get("output"), (*path, "output")),
            }
        )
    elif kind == "reasoning":
        turn = _assistant(messages)
        content = item.get("content") or []
        turn["reasoning_content"] = _text(content, (*path, "content"), ("reasoning_text",))
    else:
        where = (*path, "type")
        shown = f" '{kind[:40]}'" if isinstance(kind, str) else ""
        raise invalid(
            join_path(where),
            f"Items of type{shown} are not supported; there are message, function_call, "
            "function_call_output and reasoning.",
            "unsupported_value",
        )


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], path: Path) -> None:
    role = _string(item, "role", path)
    if role not in _ROLES:
        raise invalid(join_path((*path, "role")), f"The roles are {', '.join(_ROLES)}.")
    text = _text(item.get("content"), (*path, "content"))
    if role == "assistant":
        turn = _assistant(messages)
        turn["content"] = turn["content"] + text
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that is under way, begun where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: dict[str, Any], path: Path) -> dict[str, Any]:
    return {
        "id": _string(item, "call_id", path),
        "type": "function",
        "function": {
            "name": _string(item, "name", path),
            "arguments": _string(item, "arguments", path),
        },
    }


def _text(content: Any, where: Path, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "send a string or an array of text parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise _wrong((*where, i), "send an object")
        kind = _string(part, "type", (*where, i))
        if kind not in kinds:
            raise invalid(
                join_path((*where, i, "type")),
                f"Parts of type '{kind[:40]}' are not supported here; send '{kinds[0]}'.",
                "unsupported_value",
            )
        texts.append(_string(part, "text", (*where, i)))
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str, path: Path) -> str:
    where = (*path, name)
    if name not in item:
        param = join_path(where)
        raise invalid(
            param, f"Missing required parameter: '{param}'.", "missing_required_parameter"
        )
    value = item[name]
    if not isinstance(value, str):
        raise _wrong(where, "send a string")
    return value


def _wrong(where: Path, rule: str) -> ApiError:
    param = join_path(where)
    return invalid(param, f"Invalid '{param}': {rule}.", "invalid_type")
