"""Chat messages of the wire to the flat ones a chat template takes."""

from typing import Any

from server.errors import ApiError, invalid, not_unicode
from server.paths import join_path
from server.strict_json import StrictJsonError, lone_surrogate, parse_strict

__all__ = ["flatten_messages"]

_ROLES = ("assistant", "developer", "system", "tool", "user")
# Clients send back the assistant's message as they got it, empty fields included.
_MUST_BE_EMPTY = ("annotations", "audio", "function_call", "refusal")
# What clients' helpers made of the content, which says the same.
_REPEATED = ("parsed",)
_REASONING = ("reasoning_content", "reasoning")


def flatten_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with text content and tool calls as templates expect them.

    Parts of text are joined by a newline; `developer` is the newer name of `system`, which no
    template knows; the assistant's earlier reasoning goes along as `reasoning_content`; the
    arguments of its calls are objects. Raises ApiError 400 naming the message or part at fault.
    """
    if not messages:
        raise invalid("messages", "'messages' is empty; send at least one message.")
    return [_flatten(message, ("messages", i)) for i, message in enumerate(messages)]


def _flatten(message: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    role = _role(message, path)
    flat: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for key, value in message.items():
        where = (*path, key)
        if key in ("role", "content") or (key in _REPEATED and role == "assistant"):
            continue
        if key in _MUST_BE_EMPTY:
            if value not in (None, "", [], {}):
                raise _unsupported(where, f"'{key}' of a message is not supported")
        elif key == "tool_calls" and role == "assistant":
            if value:
                flat["tool_calls"] = _calls(value, where)
        elif key in _REASONING and role == "assistant":
            if value is not None:
                flat["reasoning_content"] = _text(value, where)
        elif key == "name" or (key == "tool_call_id" and role == "tool"):
            if value is not None:
                flat[key] = _text(value, where)
        elif value is not None:
            shown = join_path(where)[:100]
            raise invalid(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    if role == "tool" and "tool_call_id" not in flat:
        raise _missing((*path, "tool_call_id"))
    flat["content"] = _content(message, role, (*path, "content"))
    return flat


def _calls(value: Any, where: tuple[str | int, ...]) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong_type(where, "send an array of tool calls")
    return [_call(call, (*where, i)) for i, call in enumerate(value)]


def _call(call: Any, where: tuple[str | int, ...]) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _wrong_type(where, "send an object with id, type and function")
    if call.get("type", "function") != "function":
        raise _unsupported((*where, "type"), "calls of functions are the only kind")
    function = call.get("function")
    if not isinstance(function, dict):
        raise (
            _missing((*where, "function"))
            if function is None
            else _wrong_type((*where, "function"), "send an object with name and arguments")
        )
    where = (*where, "function")
    if "name" not in function:
        raise _missing((*where, "name"))
    flat: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _text(function["name"], (*where, "name")),
            "arguments": _arguments(function.get("arguments"), (*where, "arguments")),
        },
    }
    if call.get("id") is not None:
        flat["id"] = _text(call["id"], (*where[:-1], "id"))
    return flat


def _arguments(value: Any, where: tuple[str | int, ...]) -> dict[str, Any]:
    """OpenAI's wire has a string of JSON; templates want what it says."""
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        source = value
        try:
            value = parse_strict(source)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, StrictJsonError) else "it is not JSON"
            raise invalid(join_path(where), f"Invalid '{join_path(where)}': {why}.") from None
        if lone_surrogate(value, source) is not None:
            raise not_unicode(where)
    if not isinstance(value, dict):
        raise _wrong_type(where, "send a string that holds a JSON object")
    return value


def _role(message: dict[str, Any], path: tuple[str | int, ...]) -> str:
    where = (*path, "role")
    if "role" not in message:
        raise _missing(where)
    role = _text(message["role"], where)
    if role == "function":
        raise _unsupported(where, "role 'function' is an older name; send role 'tool'")
    if role not in _ROLES:
        raise invalid(
            join_path(where), f"Unknown role {role[:40]!r}; the roles are {', '.join(_ROLES)}."
        )
    return role


def _content(message: dict[str, Any], role: str, where: tuple[str | int, ...]) -> str:
    content = message.get("content")
    if content is None:
        if role == "assistant":
            return ""
        if "content" not in message:
            raise _missing(where)
        raise _wrong_type(where, "null is for assistant messages only; send a string")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, "send a string or an array of text parts")
    return "\n".join(_part(part, (*where, i)) for i, part in enumerate(content))


def _part(part: Any, where: tuple[str | int, ...]) -> str:
    if not isinstance(part, dict):
        raise _wrong_type(where, 'send an object such as {"type": "text", "text": "..."}')
    if "type" not in part:
        raise _missing((*where, "type"))
    kind = _text(part["type"], (*where, "type"))
    if kind != "text":
        raise _unsupported(
            (*where, "type"),
            f"content parts of type '{kind[:40]}' are not supported; send parts of type 'text'",
        )
    if "text" not in part:
        raise _missing((*where, "text"))
    return _text(part["text"], (*where, "text"))


def _text(value: Any, where: tuple[str | int, ...]) -> str:
    if not isinstance(value, str):
        raise _wrong_type(where, "send a string")
    return value


def _missing(where: tuple[str | int, ...]) -> ApiError:
    param = join_path(where)
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def _wrong_type(where: tuple[str | int, ...], rule: str) -> ApiError:
    param = join_path(where)
    return invalid(param, f"Invalid '{param}': {rule}.", "invalid_type")


def _unsupported(where: tuple[str | int, ...], what: str) -> ApiError:
    param = join_path(where)
    return invalid(param, f"Invalid '{param}': {what}.", "unsupported_value")
